#include "bound_graph.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace meki {

BoundGraph::BoundGraph(const GraphSpec& spec, const GraphFile& file, std::unique_ptr<Graph> graph, KvCache& cache,
                       MemoryStates& states)
    : spec_(spec),
      file_(file),
      num_tokens_(file.num_tokens),
      cache_(cache),
      states_(states),
      embeds_(file.input("input_embeds").num_elements()),
      mask_(file.input("attention_mask").num_elements()),
      cos_(file.input("position_cos").num_elements()),
      sin_(file.input("position_sin").num_elements()),
      logits_(file.output("logits").num_elements()),
      graph_(std::move(graph)) {
    for (std::size_t j = 0; j < spec.head_dim / 2; ++j) {
        const double exponent = -2.0 * static_cast<double>(j) / static_cast<double>(spec.head_dim);
        frequencies_.push_back(std::pow(spec.rope_theta, exponent));
    }
    graph_->bind_input(file.input("input_embeds"), embeds_.data());
    graph_->bind_input(file.input("attention_mask"), mask_.data());
    graph_->bind_input(file.input("position_cos"), cos_.data());
    graph_->bind_input(file.input("position_sin"), sin_.data());
    graph_->bind_output(file.output("logits"), logits_.data());
    for (std::vector<RowTensor>& slot : rows_) {
        for (const RowFile& rom : spec.roms) {
            slot.emplace_back(RowTensor::Shape{num_tokens_, rom.rows_per_token, rom.row_dim}, spec.mask_value);
        }
    }
    use_row_slot(0);
    for (std::size_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
        graph_->bind_input(file.input("past_key", layer), cache.keys(layer));
        graph_->bind_input(file.input("past_value", layer), cache.values(layer));
        const TensorSpec& key = file.output("present_key", layer);
        const TensorSpec& value = file.output("present_value", layer);
        graph_->bind_output(key, present_keys_.emplace_back(key.num_elements()).data());
        graph_->bind_output(value, present_values_.emplace_back(value.num_elements()).data());
    }
    for (std::size_t index = 0; index < spec.memory_states.size(); ++index) {
        graph_->bind_input(file.input("memory_state", index), states.state(index));
        const TensorSpec& present = file.output("present_memory_state", index);
        graph_->bind_output(present, present_states_.emplace_back(present.num_elements()).data());
    }
}

void BoundGraph::set_position(std::size_t position) {
    const std::size_t context = spec_.context_length;
    for (std::size_t token = 0; token < num_tokens_; ++token) {
        float* mask = mask_.data() + token * (context + num_tokens_);
        std::fill(mask, mask + position, 0.0f);
        std::fill(mask + position, mask + context, spec_.mask_value);
        std::fill(mask + context, mask + context + token + 1, 0.0f);
        std::fill(mask + context + token + 1, mask + context + num_tokens_, spec_.mask_value);
        // In double: float32 angles drift by whole radians at long contexts.
        const std::size_t half = frequencies_.size();
        for (std::size_t j = 0; j < half; ++j) {
            const double angle = static_cast<double>(position + token) * frequencies_[j];
            cos_.data()[token * half + j] = static_cast<float>(std::cos(angle));
            sin_.data()[token * half + j] = static_cast<float>(std::sin(angle));
        }
    }
}

void BoundGraph::use_row_slot(std::size_t slot) {
    if (slot == row_slot_) {
        return;
    }
    row_slot_ = slot;
    for (std::size_t rom = 0; rom < spec_.roms.size(); ++rom) {
        graph_->bind_input(file_.input("memory_rows", rom), rows(rom, slot).rows());
        if (spec_.roms[rom].masked()) {
            graph_->bind_input(file_.input("memory_mask", rom), rows(rom, slot).mask());
        }
    }
}

void BoundGraph::write_back(std::size_t count, std::size_t position) {
    for (std::size_t layer = 0; layer < present_keys_.size(); ++layer) {
        cache_.write(layer, present_keys_[layer].data(), present_values_[layer].data(), num_tokens_, count, position);
    }
    for (std::size_t index = 0; index < present_states_.size(); ++index) {
        states_.shift(index, present_states_[index].data(), count);
    }
}

}  // namespace meki
