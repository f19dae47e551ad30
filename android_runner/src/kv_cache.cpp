#include "kv_cache.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>

namespace meki {

namespace {

// The first `count` of each `source_stride` elements of `num_rows` rows.
template <typename T>
void copy_rows(const void* source, std::size_t source_stride, void* target, std::size_t target_stride,
               std::size_t num_rows, std::size_t count) {
    const T* from = static_cast<const T*>(source);
    T* to = static_cast<T*>(target);
    for (std::size_t row = 0; row < num_rows; ++row) {
        std::copy_n(from + row * source_stride, count, to + row * target_stride);
    }
}

// Elements are copied by their size; only float32 has four bytes.
template <typename... Arguments>
void copy_rows_of(std::size_t element_bytes, Arguments... arguments) {
    if (element_bytes == 4) {
        copy_rows<float>(arguments...);
    } else if (element_bytes == 2) {
        copy_rows<std::uint16_t>(arguments...);
    } else {
        copy_rows<std::uint8_t>(arguments...);
    }
}

// Rows of `stride` elements, one behind the other, move to a larger stride; between them lie zeros. The last row
// goes first: what it overwrites has moved already.
void spread_rows(const TensorData& data, std::size_t num_rows, std::size_t stride, std::size_t larger) {
    for (std::size_t row = num_rows; row-- > 0;) {
        std::memmove(data.at(row * larger), data.at(row * stride), stride * data.type().size());
        fill(data.type(), 0, larger - stride, data.at(row * larger + stride));
    }
}

}  // namespace

KvCache::KvCache(const GraphSpec& spec, Allocator& allocator)
    : num_heads_(spec.num_key_value_heads),
      head_dim_(spec.head_dim),
      shortest_(spec.contexts.front().length),
      num_slots_(shortest_) {
    const std::size_t size = num_heads_ * head_dim_ * spec.longest().length;
    for (std::size_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
        keys_.emplace_back(spec.longest().decode.input("past_key", layer).type, size, allocator);
        values_.emplace_back(spec.longest().decode.input("past_value", layer).type, size, allocator);
    }
}

void KvCache::grow(std::size_t num_slots) {
    assert(num_slots >= num_slots_);
    if (num_slots == num_slots_) {
        return;
    }
    for (std::size_t layer = 0; layer < keys_.size(); ++layer) {
        spread_rows(keys_[layer], num_heads_ * head_dim_, num_slots_, num_slots);
        spread_rows(values_[layer], num_heads_, num_slots_ * head_dim_, num_slots * head_dim_);
    }
    num_slots_ = num_slots;
}

void KvCache::write(std::size_t layer, const void* present_key, const void* present_value, std::size_t num_tokens,
                    std::size_t count, std::size_t position) {
    assert(count <= num_tokens && position + count <= num_slots_);
    const TensorData& keys = keys_[layer];
    copy_rows_of(keys.type().size(), present_key, num_tokens, keys.at(position), num_slots_,
                 num_heads_ * head_dim_, count);
    const TensorData& values = values_[layer];
    copy_rows_of(values.type().size(), present_value, num_tokens * head_dim_, values.at(position * head_dim_),
                 num_slots_ * head_dim_, num_heads_, count * head_dim_);
}

void KvCache::clear() {
    for (std::size_t layer = 0; layer < keys_.size(); ++layer) {
        keys_[layer].clear();
        values_[layer].clear();
    }
    num_slots_ = shortest_;
}

}  // namespace meki
