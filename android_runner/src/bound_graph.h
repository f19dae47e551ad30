// A graph with the memory of its inputs and outputs: what the host fills before a step and reads after.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "backend.h"
#include "buffer.h"
#include "graph_spec.h"
#include "kv_cache.h"
#include "memory_states.h"
#include "row_tensor.h"

namespace meki {

class BoundGraph {
public:
    // Row buffers for each ROM file: the step under way reads one while the next one's rows arrive.
    static constexpr std::size_t num_row_slots = 2;

    // Binds everything once; `cache` and `states` must outlive the graph.
    BoundGraph(const GraphSpec& spec, const GraphFile& file, std::unique_ptr<Graph> graph, KvCache& cache,
               MemoryStates& states);

    std::size_t num_tokens() const { return num_tokens_; }
    float* embeds() { return embeds_.data(); }  // [T, hidden_size]
    RowTensor& rows(std::size_t rom, std::size_t slot) { return rows_[slot][rom]; }
    const float* logits(std::size_t token) const { return logits_.data() + token * spec_.vocab_size; }

    // Fills the mask and the rotary angles for T tokens after `position` cached ones.
    void set_position(std::size_t position);
    // The row buffers that the next runs read. Binding again costs an allocation, so only if it changes.
    void use_row_slot(std::size_t slot);
    void run() { graph_->run(); }
    // Writes what the first `count` tokens of the last run leave behind into the cache and the states.
    void write_back(std::size_t count, std::size_t position);

private:
    const GraphSpec& spec_;
    const GraphFile& file_;
    std::size_t num_tokens_;
    KvCache& cache_;
    MemoryStates& states_;
    std::size_t row_slot_ = num_row_slots;
    std::vector<double> frequencies_;  // [D/2]
    Buffer<float> embeds_;
    Buffer<float> mask_;
    Buffer<float> cos_;
    Buffer<float> sin_;
    Buffer<float> logits_;
    std::array<std::vector<RowTensor>, num_row_slots> rows_;
    std::vector<Buffer<float>> present_keys_;
    std::vector<Buffer<float>> present_values_;
    std::vector<Buffer<float>> present_states_;
    std::unique_ptr<Graph> graph_;  // last: it goes before the memory that it is bound to
};

}  // namespace meki
