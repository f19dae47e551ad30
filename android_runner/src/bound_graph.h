// A graph with the memory of its inputs and outputs: what the host fills before a step and reads after. It is there
// in every context; little of its memory depends on that, so there is one of the rest.
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

    using Parts = std::vector<std::unique_ptr<Graph>>;

    // Binds everything once. `file` is the prefill or the decode graph, `contexts` are its parts in each context of
    // the spec, in order; the last one may be left out where the head is apart. `spec`, `cache`, `states` and
    // `allocator` must outlive the graph.
    BoundGraph(const GraphSpec& spec, GraphFile Context::*file, std::vector<Parts> contexts, KvCache& cache,
               MemoryStates& states, Allocator& allocator);

    std::size_t num_tokens() const { return num_tokens_; }
    std::size_t num_parts() const { return new_roms_.size() - (has_head_ ? 0 : 1); }
    // The ROM files whose rows `part` takes and no part before it: what it has to wait for.
    const std::vector<std::size_t>& new_roms(std::size_t part) const { return new_roms_[part]; }
    float* embeds() { return embeds_.values(); }  // [T, hidden_size]
    RowTensor& rows(std::size_t rom, std::size_t slot) { return rows_[slot][rom]; }
    // Whether it gives logits.
    bool has_head() const { return has_head_; }
    // Of a token of the last run, until the next call.
    const float* logits(std::size_t token);
    // Runs the head alone, which is apart, for a token of the last run of another graph.
    void run_head(std::size_t context, const BoundGraph& other, std::size_t token);

    // For the runs that follow: the embeddings that were written, the mask and rotary angles of T tokens after
    // `position` cached ones, and the row buffers of `row_slot`. They run in the context of that index; the cache
    // grows to its length. Other row buffers than before cost an allocation.
    void set_inputs(std::size_t context, std::size_t position, std::size_t row_slot);
    void run(std::size_t part) { contexts_[context_].parts[part]->run(); }
    // Writes what the first `count` tokens of the last run leave behind into the cache and the states. The cache must
    // not have grown since.
    void write_back(std::size_t count, std::size_t position);

private:
    // What the graph has in one context alone.
    struct InContext {
        const Context& context;
        const GraphFile& file;
        HostInput mask;
        std::size_t row_slot;  // whose buffers are bound
        Parts parts;           // last: they go before the memory that they are bound to
    };

    // Without any context yet.
    BoundGraph(const GraphSpec& spec, const GraphFile& file, bool has_head, KvCache& cache, MemoryStates& states,
               Allocator& allocator);

    // The memory of an input or output.
    void* memory(const InContext& in, const TensorSpec& tensor);
    void bind_row_slot(InContext& in, std::size_t slot);

    const GraphSpec& spec_;
    std::size_t num_tokens_;
    bool has_head_;
    KvCache& cache_;
    MemoryStates& states_;
    std::size_t context_ = 0;  // of the runs
    std::vector<std::vector<std::size_t>> new_roms_;
    std::vector<double> frequencies_;  // [D/2]
    HostInput embeds_;
    HostInput cos_;
    HostInput sin_;
    TensorData logits_;
    Buffer<float> token_logits_;  // of one token, where the graph does not give float32
    std::array<std::vector<RowTensor>, num_row_slots> rows_;
    std::vector<TensorData> hidden_;  // after each part of the file but the last
    std::vector<TensorData> present_keys_;
    std::vector<TensorData> present_values_;
    std::vector<TensorData> present_states_;
    std::vector<InContext> contexts_;  // last: the parts go before the memory that they are bound to
};

}  // namespace meki
