// How the elements of a graph's inputs and outputs are stored, and the way between them and float32.
#pragma once

#include <cstddef>
#include <optional>

#include "buffer.h"
#include "quantization.h"

namespace meki {

enum class DType { float32, float16, uint8, int8, uint16, int16 };

struct ElementType {
    DType dtype = DType::float32;
    std::optional<Quantization> quantization;  // of integers, always

    std::size_t size() const;  // bytes of an element

    friend bool operator==(const ElementType& a, const ElementType& b) {
        return a.dtype == b.dtype && a.quantization == b.quantization;
    }
    friend bool operator!=(const ElementType& a, const ElementType& b) { return !(a == b); }
};

// `count` values as elements: rounded to the nearest, ties to even; integers saturate.
void encode(const ElementType& type, const float* values, std::size_t count, void* elements);
void decode(const ElementType& type, const void* elements, std::size_t count, float* values);
// `count` elements that mean `value`.
void fill(const ElementType& type, float value, std::size_t count, void* elements);

// Memory for elements of one type, all zero at first: not the bytes, but what they mean.
class TensorData {
public:
    // `allocator` must outlive it.
    TensorData(const ElementType& type, std::size_t size, Allocator& allocator)
        : type_(type), size_(size), bytes_(size * type.size(), allocator) {
        clear();
    }

    const ElementType& type() const { return type_; }
    std::size_t size() const { return size_; }  // elements
    void* data() const { return bytes_.data(); }
    // The element at `index`.
    void* at(std::size_t index) const { return bytes_.data() + index * type_.size(); }
    void clear() { fill(type_, 0, size_, data()); }

private:
    ElementType type_;
    std::size_t size_;
    Buffer<unsigned char> bytes_;
};

// An input that the host computes in float32: where it writes, and what the graph is bound to. They are the
// same memory where the graph takes float32.
class HostInput {
public:
    // `allocator`, which must outlive it, gives the memory that the graph is bound to.
    HostInput(const ElementType& type, std::size_t size, Allocator& allocator)
        : elements_(type, size, allocator), values_(type == ElementType() ? 0 : size) {}

    float* values() const {
        return values_.size() == 0 ? static_cast<float*>(elements_.data()) : values_.data();
    }
    void* data() const { return elements_.data(); }
    // Call it when all values are written.
    void encode() const {
        if (values_.size() != 0) {
            meki::encode(elements_.type(), values_.data(), elements_.size(), elements_.data());
        }
    }

private:
    TensorData elements_;
    Buffer<float> values_;
};

}  // namespace meki
