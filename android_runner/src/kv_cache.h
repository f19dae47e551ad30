// The keys and values of the past: one buffer a layer for each, in the graphs' own type and bound to all of
// them alike, so no step copies or converts the cache. New tokens are written in place.
//
// Keys lie transposed, [KV, D, C]; values as [KV, C, D] (C slots, D head_dim). C is the length of the context that
// the text runs in: the buffers have room for the longest and stay where they are, and what is in them is spread
// further apart when the text outgrows a shorter one.
#pragma once

#include <cstddef>
#include <vector>

#include "element_type.h"
#include "graph_spec.h"

namespace meki {

class KvCache {
public:
    // `allocator` must outlive it.
    KvCache(const GraphSpec& spec, Allocator& allocator);

    void* keys(std::size_t layer) { return keys_[layer].data(); }
    void* values(std::size_t layer) { return values_[layer].data(); }

    // Spreads what is there over `num_slots` slots, of a context as long as the one until now or longer.
    void grow(std::size_t num_slots);

    // Writes the first `count` of `num_tokens` new tokens of a layer (keys [KV, D, num_tokens], values
    // [KV, num_tokens, D], of the cache's type) at slots position … position + count - 1.
    void write(std::size_t layer, const void* present_key, const void* present_value, std::size_t num_tokens,
               std::size_t count, std::size_t position);

    // Empty, for the shortest context.
    void clear();

private:
    std::size_t num_heads_;
    std::size_t head_dim_;
    std::size_t shortest_;
    std::size_t num_slots_;
    std::vector<TensorData> keys_;
    std::vector<TensorData> values_;
};

}  // namespace meki
