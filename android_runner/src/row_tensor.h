// What a graph takes of one ROM file: the rows of T tokens, with K places a token.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "element_type.h"

namespace meki {

class RowTensor {
public:
    struct Shape {
        std::size_t num_tokens;      // T
        std::size_t rows_per_token;  // K
        std::size_t row_dim;
    };

    // `mask_value` marks the places that hold no row. `allocator` must outlive the tensor.
    RowTensor(const Shape& shape, float mask_value, Allocator& allocator, const ElementType& type = {},
              const ElementType& mask_type = {})
        : shape_(shape),
          mask_value_(mask_value),
          rows_(type, shape.num_tokens * shape.rows_per_token * shape.row_dim, allocator),
          mask_(mask_type, shape.num_tokens * shape.rows_per_token, allocator),
          counts_(shape.num_tokens) {
        fill(mask_.type(), mask_value, mask_.size(), mask_.data());
    }

    const Shape& shape() const { return shape_; }
    const ElementType& type() const { return rows_.type(); }
    std::size_t size() const { return rows_.size(); }
    void* rows() const { return rows_.data(); }  // [T, K, row_dim]
    void* mask() const { return mask_.data(); }  // [T, K]: 0 where there is a row
    const std::vector<std::size_t>& counts() const { return counts_; }  // [T]

    // Where row `place` of a token goes.
    void* row(std::size_t token, std::size_t place) const {
        return rows_.at((token * shape_.rows_per_token + place) * shape_.row_dim);
    }

    // The token has `count` rows, which the caller writes; its other places become zeros. What is zero
    // already is not written again: most tokens have far fewer rows than there are places.
    void set_count(std::size_t token, std::size_t count) {
        if (counts_[token] > count) {
            fill(type(), 0, (counts_[token] - count) * shape_.row_dim, row(token, count));
        }
        counts_[token] = count;
        const std::size_t first = token * shape_.rows_per_token;
        fill(mask_.type(), 0, count, mask_.at(first));
        fill(mask_.type(), mask_value_, shape_.rows_per_token - count, mask_.at(first + count));
    }

private:
    Shape shape_;
    float mask_value_;
    TensorData rows_;
    TensorData mask_;
    std::vector<std::size_t> counts_;
};

}  // namespace meki
