// The keys and values of the past: one buffer a layer for each, in the graphs' own type and bound to the
// prefill and the decode graph alike, so no step copies or converts the cache. New tokens are written in place.
//
// Keys lie transposed, [KV, D, C]; values as [KV, C, D] (C context_length, D head_dim).
#pragma once

#include <cstddef>
#include <vector>

#include "element_type.h"
#include "graph_spec.h"

namespace meki {

class KvCache {
public:
    explicit KvCache(const GraphSpec& spec);

    void* keys(std::size_t layer) { return keys_[layer].data(); }
    void* values(std::size_t layer) { return values_[layer].data(); }

    // Writes the first `count` of `num_tokens` new tokens of a layer (keys [KV, D, num_tokens], values
    // [KV, num_tokens, D], of the cache's type) at slots position … position + count - 1.
    void write(std::size_t layer, const void* present_key, const void* present_value, std::size_t num_tokens,
               std::size_t count, std::size_t position);

    void clear();

private:
    std::size_t num_heads_;
    std::size_t head_dim_;
    std::size_t context_length_;
    std::vector<TensorData> keys_;
    std::vector<TensorData> values_;
};

}  // namespace meki
