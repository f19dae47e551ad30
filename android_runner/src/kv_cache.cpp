#include "kv_cache.h"

#include <algorithm>
#include <cassert>

namespace meki {

KvCache::KvCache(const GraphSpec& spec)
    : num_heads_(spec.num_key_value_heads), head_dim_(spec.head_dim), context_length_(spec.context_length) {
    const std::size_t size = num_heads_ * head_dim_ * context_length_;
    for (std::size_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
        keys_.emplace_back(size);
        values_.emplace_back(size);
    }
}

void KvCache::write(std::size_t layer, const float* present_key, const float* present_value, std::size_t num_tokens,
                    std::size_t count, std::size_t position) {
    assert(count <= num_tokens && position + count <= context_length_);
    float* key = keys(layer) + position;
    for (std::size_t row = 0; row < num_heads_ * head_dim_; ++row) {
        std::copy_n(present_key + row * num_tokens, count, key + row * context_length_);
    }
    float* value = values(layer) + position * head_dim_;
    for (std::size_t head = 0; head < num_heads_; ++head) {
        std::copy_n(present_value + head * num_tokens * head_dim_, count * head_dim_,
                    value + head * context_length_ * head_dim_);
    }
}

void KvCache::clear() {
    for (std::size_t layer = 0; layer < keys_.size(); ++layer) {
        keys_[layer].clear();
        values_[layer].clear();
    }
}

}  // namespace meki
