#include "bound_graph.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <utility>

namespace meki {

namespace {

HostInput host_input(const GraphFile& file, const char* role, Allocator& allocator) {
    const TensorSpec& tensor = file.input(role);
    return {tensor.type, tensor.num_elements(), allocator};
}

std::vector<TensorData> outputs_data(const GraphFile& file, const char* role, std::size_t count,
                                     Allocator& allocator) {
    std::vector<TensorData> memory;
    for (std::size_t index = 0; index < count; ++index) {
        const TensorSpec& tensor = file.output(role, index);
        memory.emplace_back(tensor.type, tensor.num_elements(), allocator);
    }
    return memory;
}

// The ROM files that each part is the first to take.
std::vector<std::vector<std::size_t>> find_new_roms(const GraphFile& file, std::size_t num_roms) {
    std::vector<std::vector<std::size_t>> found(file.parts.size());
    for (std::size_t rom = 0; rom < num_roms; ++rom) {
        const auto takes = [rom](const PartFile& part) {
            return std::any_of(part.inputs.begin(), part.inputs.end(), [rom](const TensorSpec& tensor) {
                return tensor.role == "memory_rows" && tensor.index == rom;
            });
        };
        const auto first = std::find_if(file.parts.begin(), file.parts.end(), takes);
        found[static_cast<std::size_t>(first - file.parts.begin())].push_back(rom);
    }
    return found;
}

}  // namespace

BoundGraph::BoundGraph(const GraphSpec& spec, GraphFile Context::*file, std::vector<Parts> contexts, KvCache& cache,
                       MemoryStates& states, Allocator& allocator)
    : BoundGraph(spec, spec.longest().*file, contexts.front().size() == (spec.longest().*file).parts.size(), cache,
                 states, allocator) {
    for (std::size_t i = 0; i < contexts.size(); ++i) {
        const Context& context = spec.contexts[i];
        const GraphFile& own = context.*file;
        contexts_.push_back({context, own, host_input(own, "attention_mask", allocator), 0, std::move(contexts[i])});
        for (std::size_t part = 0; part < num_parts(); ++part) {
            for (const TensorSpec& tensor : own.parts[part].inputs) {
                contexts_[i].parts[part]->bind_input(tensor, memory(contexts_[i], tensor));
            }
            for (const TensorSpec& tensor : own.parts[part].outputs) {
                contexts_[i].parts[part]->bind_output(tensor, memory(contexts_[i], tensor));
            }
        }
    }
}

BoundGraph::BoundGraph(const GraphSpec& spec, const GraphFile& file, bool has_head, KvCache& cache,
                       MemoryStates& states, Allocator& allocator)
    : spec_(spec),
      num_tokens_(file.num_tokens),
      has_head_(has_head),
      cache_(cache),
      states_(states),
      new_roms_(find_new_roms(file, spec.roms.size())),
      embeds_(host_input(file, "input_embeds", allocator)),
      cos_(host_input(file, "position_cos", allocator)),
      sin_(host_input(file, "position_sin", allocator)),
      logits_(file.output("logits").type, has_head ? num_tokens_ * spec.vocab_size : 0, allocator),
      token_logits_(logits_.type() == ElementType() ? 0 : spec.vocab_size),
      hidden_(outputs_data(file, "hidden", file.parts.size() - 1, allocator)),
      present_keys_(outputs_data(file, "present_key", spec.num_hidden_layers, allocator)),
      present_values_(outputs_data(file, "present_value", spec.num_hidden_layers, allocator)),
      present_states_(outputs_data(file, "present_memory_state", spec.memory_states.size(), allocator)) {
    for (std::size_t j = 0; j < spec.head_dim / 2; ++j) {
        const double exponent = -2.0 * static_cast<double>(j) / static_cast<double>(spec.head_dim);
        frequencies_.push_back(std::pow(spec.rope_theta, exponent));
    }
    for (std::vector<RowTensor>& slot : rows_) {
        for (std::size_t rom = 0; rom < spec.roms.size(); ++rom) {
            const RowFile& rows = spec.roms[rom];
            slot.emplace_back(RowTensor::Shape{num_tokens_, rows.rows_per_token, rows.row_dim}, spec.mask_value,
                              allocator, file.input("memory_rows", rom).type,
                              rows.masked() ? file.input("memory_mask", rom).type : ElementType());
        }
    }
}

void BoundGraph::run_head(std::size_t context, const BoundGraph& other, std::size_t token) {
    const TensorData& hidden = other.hidden_.back();
    const std::size_t size = spec_.hidden_size;
    std::memcpy(hidden_.back().data(), hidden.at(token * size), size * hidden.type().size());
    context_ = context;
    run(num_parts() - 1);
}

const float* BoundGraph::logits(std::size_t token) {
    void* const logits = logits_.at(token * spec_.vocab_size);
    if (token_logits_.size() == 0) {
        return static_cast<const float*>(logits);
    }
    decode(logits_.type(), logits, spec_.vocab_size, token_logits_.data());
    return token_logits_.data();
}

void BoundGraph::set_inputs(std::size_t context, std::size_t position, std::size_t row_slot) {
    context_ = context;
    InContext& in = contexts_[context];
    const std::size_t length = in.context.length;
    cache_.grow(length);
    for (std::size_t token = 0; token < num_tokens_; ++token) {
        float* mask = in.mask.values() + token * (length + num_tokens_);
        std::fill(mask, mask + position, 0.0f);
        std::fill(mask + position, mask + length, spec_.mask_value);
        std::fill(mask + length, mask + length + token + 1, 0.0f);
        std::fill(mask + length + token + 1, mask + length + num_tokens_, spec_.mask_value);
        // In double: float32 angles drift by whole radians at long contexts.
        const std::size_t half = frequencies_.size();
        for (std::size_t j = 0; j < half; ++j) {
            const double angle = static_cast<double>(position + token) * frequencies_[j];
            cos_.values()[token * half + j] = static_cast<float>(std::cos(angle));
            sin_.values()[token * half + j] = static_cast<float>(std::sin(angle));
        }
    }
    for (const HostInput* input : {&embeds_, &in.mask, &cos_, &sin_}) {
        input->encode();
    }
    if (in.row_slot != row_slot) {
        bind_row_slot(in, row_slot);
    }
}

void BoundGraph::bind_row_slot(InContext& in, std::size_t slot) {
    in.row_slot = slot;
    for (std::size_t part = 0; part < in.parts.size(); ++part) {
        for (const TensorSpec& tensor : in.file.parts[part].inputs) {
            if (tensor.role == "memory_rows" || tensor.role == "memory_mask") {
                in.parts[part]->bind_input(tensor, memory(in, tensor));
            }
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

void* BoundGraph::memory(const InContext& in, const TensorSpec& tensor) {
    const std::string& role = tensor.role;
    if (role == "input_embeds") {
        return embeds_.data();
    }
    if (role == "attention_mask") {
        return in.mask.data();
    }
    if (role == "position_cos") {
        return cos_.data();
    }
    if (role == "position_sin") {
        return sin_.data();
    }
    if (role == "hidden") {
        return hidden_[tensor.index].data();
    }
    if (role == "memory_rows") {
        return rows(tensor.index, in.row_slot).rows();
    }
    if (role == "memory_mask") {
        return rows(tensor.index, in.row_slot).mask();
    }
    if (role == "past_key") {
        return cache_.keys(tensor.index);
    }
    if (role == "past_value") {
        return cache_.values(tensor.index);
    }
    if (role == "memory_state") {
        return states_.state(tensor.index);
    }
    if (role == "present_key") {
        return present_keys_[tensor.index].data();
    }
    if (role == "present_value") {
        return present_values_[tensor.index].data();
    }
    if (role == "present_memory_state") {
        return present_states_[tensor.index].data();
    }
    assert(role == "logits");  // read_graph_spec knows no other
    return logits_.data();
}

}  // namespace meki
