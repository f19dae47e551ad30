// A graph with the memory of its inputs and outputs: what the host fills before a step and reads after.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "backend.h"
#include "buffer.h"
#include "element_type.h"
#include "graph_spec.h"
#include "kv_cache.h"
#include "memory_states.h"
#include "row_tensor.h"

namespace meki {

class BoundGraph {
public:
    // Row buffers for each ROM file: the step under way reads one while the next one's rows arrive.
    static constexpr std::size_t num_row_slots = 2;

    // Binds everything once; `parts` are those of `file`, in order. `cache` and `states` must outlive the graph.
    BoundGraph(const GraphSpec& spec, const GraphFile& file, std::vector<std::unique_ptr<Graph>> parts, KvCache& cache,
               MemoryStates& states);

    std::size_t num_tokens() const { return num_tokens_; }
    std::size_t num_parts() const { return parts_.size(); }
    // The ROM files whose rows `part` takes and no part before it: what it has to wait for.
    const std::vector<std::size_t>& new_roms(std::size_t part) const { return new_roms_[part]; }
    float* embeds() { return embeds_.values(); }  // [T, hidden_size]
    RowTensor& rows(std::size_t rom, std::size_t slot) { return rows_[slot][rom]; }
    // Of a token of the last run, until the next call.
    const float* logits(std::size_t token);

    // Hands over the embeddings that were written, and the mask and rotary angles of T tokens after
    // `position` cached ones.
    void set_inputs(std::size_t position);
    // The row buffers that the next runs read. Binding again costs an allocation, so only if it changes.
    void use_row_slot(std::size_t slot);
    void run(std::size_t part) { parts_[part]->run(); }
    // Writes what the first `count` tokens of the last run leave behind into the cache and the states.
    void write_back(std::size_t count, std::size_t position);

private:
    // The memory of an input or output.
    void* memory(const TensorSpec& tensor);

    const GraphSpec& spec_;
    const GraphFile& file_;
    std::size_t num_tokens_;
    KvCache& cache_;
    MemoryStates& states_;
    std::size_t row_slot_ = 0;
    std::vector<std::vector<std::size_t>> new_roms_;
    std::vector<double> frequencies_;  // [D/2]
    HostInput embeds_;
    HostInput mask_;
    HostInput cos_;
    HostInput sin_;
    TensorData logits_;
    Buffer<float> token_logits_;  // of one token, where the graph does not give float32
    std::array<std::vector<RowTensor>, num_row_slots> rows_;
    std::vector<TensorData> hidden_;  // after each part but the last
    std::vector<TensorData> present_keys_;
    std::vector<TensorData> present_values_;
    std::vector<TensorData> present_states_;
    std::vector<std::unique_ptr<Graph>> parts_;  // last: they go before the memory that they are bound to
};

}  // namespace meki
