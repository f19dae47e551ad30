// What a graph takes of one ROM file: the rows of T tokens, with K places a token.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "buffer.h"

namespace meki {

class RowTensor {
public:
    struct Shape {
        std::size_t num_tokens;      // T
        std::size_t rows_per_token;  // K
        std::size_t row_dim;
    };

    // `mask_value` marks the places that hold no row.
    RowTensor(const Shape& shape, float mask_value)
        : shape_(shape),
          mask_value_(mask_value),
          rows_(shape.num_tokens * shape.rows_per_token * shape.row_dim),
          mask_(shape.num_tokens * shape.rows_per_token),
          counts_(shape.num_tokens) {
        std::fill_n(mask_.data(), mask_.size(), mask_value);
    }

    const Shape& shape() const { return shape_; }
    std::size_t size() const { return rows_.size(); }
    float* rows() const { return rows_.data(); }  // [T, K, row_dim]
    float* mask() const { return mask_.data(); }  // [T, K]: 0 where there is a row
    const std::vector<std::size_t>& counts() const { return counts_; }  // [T]

    // Where row `place` of a token goes.
    float* row(std::size_t token, std::size_t place) const {
        return rows_.data() + (token * shape_.rows_per_token + place) * shape_.row_dim;
    }

    // The token has `count` rows, which the caller writes; its other places become zeros. What is zero
    // already is not written again: most tokens have far fewer rows than there are places.
    void set_count(std::size_t token, std::size_t count) {
        if (counts_[token] > count) {
            std::fill(row(token, count), row(token, counts_[token]), 0.0f);
        }
        counts_[token] = count;
        float* mask = mask_.data() + token * shape_.rows_per_token;
        std::fill(mask, mask + count, 0.0f);
        std::fill(mask + count, mask + shape_.rows_per_token, mask_value_);
    }

private:
    Shape shape_;
    float mask_value_;
    Buffer<float> rows_;
    Buffer<float> mask_;
    std::vector<std::size_t> counts_;
};

}  // namespace meki
