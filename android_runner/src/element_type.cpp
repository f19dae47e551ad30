#include "element_type.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <limits>

#include "half.h"

namespace meki {

namespace {

// Values up to 2^22 plus this lose all that is behind the point, rounded half to even.
constexpr float rounder = 12582912.0f;

template <typename T>
void quantize(const Quantization& quantization, const float* values, std::size_t count, T* elements) {
    const float scale = quantization.scale;
    const std::int32_t zero_point = quantization.zero_point;
    const auto lowest = static_cast<float>(std::numeric_limits<T>::min() - zero_point);
    const auto highest = static_cast<float>(std::numeric_limits<T>::max() - zero_point);
    for (std::size_t i = 0; i < count; ++i) {
        float steps = values[i] / scale;
        steps = steps > lowest ? steps : lowest;  // NaN too
        steps = steps < highest ? steps : highest;
        elements[i] = static_cast<T>(static_cast<std::int32_t>((steps + rounder) - rounder) + zero_point);
    }
}

template <typename T>
void dequantize(const Quantization& quantization, const T* elements, std::size_t count, float* values) {
    for (std::size_t i = 0; i < count; ++i) {
        values[i] = static_cast<float>(std::int32_t{elements[i]} - quantization.zero_point) * quantization.scale;
    }
}

// Calls `call` with a null pointer to the type of the integers.
template <typename Call>
void with_integer(const ElementType& type, Call call) {
    assert(type.quantization);
    switch (type.dtype) {
        case DType::uint8:
            return call(static_cast<std::uint8_t*>(nullptr));
        case DType::int8:
            return call(static_cast<std::int8_t*>(nullptr));
        case DType::uint16:
            return call(static_cast<std::uint16_t*>(nullptr));
        case DType::int16:
            return call(static_cast<std::int16_t*>(nullptr));
        default:
            assert(false);
    }
}

}  // namespace

std::size_t ElementType::size() const {
    switch (dtype) {
        case DType::float32:
            return 4;
        case DType::float16:
        case DType::uint16:
        case DType::int16:
            return 2;
        default:
            return 1;
    }
}

void encode(const ElementType& type, const float* values, std::size_t count, void* elements) {
    if (type.dtype == DType::float32) {
        std::memcpy(elements, values, count * sizeof(float));
    } else if (type.dtype == DType::float16) {
        std::transform(values, values + count, static_cast<std::uint16_t*>(elements), float_to_half);
    } else {
        with_integer(type, [&](auto* integer) {
            quantize(*type.quantization, values, count, static_cast<decltype(integer)>(elements));
        });
    }
}

void decode(const ElementType& type, const void* elements, std::size_t count, float* values) {
    if (type.dtype == DType::float32) {
        std::memcpy(values, elements, count * sizeof(float));
    } else if (type.dtype == DType::float16) {
        const auto* halves = static_cast<const std::uint16_t*>(elements);
        std::transform(halves, halves + count, values, half_to_float);
    } else {
        with_integer(type, [&](auto* integer) {
            dequantize(*type.quantization, static_cast<const std::remove_pointer_t<decltype(integer)>*>(elements),
                       count, values);
        });
    }
}

void fill(const ElementType& type, float value, std::size_t count, void* elements) {
    unsigned char element[sizeof(float)];
    encode(type, &value, 1, element);
    const std::size_t size = type.size();
    auto* const begin = static_cast<unsigned char*>(elements);
    if (size == 1) {
        std::memset(begin, element[0], count);
    } else if (size == 2) {
        std::uint16_t half;
        std::memcpy(&half, element, sizeof half);
        std::fill_n(reinterpret_cast<std::uint16_t*>(begin), count, half);
    } else {
        std::fill_n(reinterpret_cast<float*>(begin), count, value);
    }
}

}  // namespace meki
