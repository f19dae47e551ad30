// Every half and every integer there and back; rounding between neighbours; what is out of range.

#include "element_type.h"

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "half.h"

namespace {

using meki::DType;
using meki::ElementType;

void halves() {
    float previous = -1;
    for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {
        const auto half = static_cast<std::uint16_t>(bits);
        const float value = meki::half_to_float(half);
        // By the definition: mantissa times a power of two.
        const int exponent = static_cast<int>(bits >> 10);
        const double mantissa = (bits & 0x3ff) + (exponent > 0 ? 1024 : 0);
        CHECK(static_cast<double>(value) == std::ldexp(mantissa, std::max(exponent, 1) - 25));
        CHECK(meki::float_to_half(value) == half);
        CHECK(meki::float_to_half(-value) == (half | 0x8000));
        if (bits > 0) {
            const float middle = (previous + value) / 2;  // exact in float32
            const auto even = static_cast<std::uint16_t>(bits % 2 == 0 ? bits : bits - 1);
            CHECK(meki::float_to_half(middle) == even);
            CHECK(meki::float_to_half(std::nextafter(middle, 0.0f)) == bits - 1);
            CHECK(meki::float_to_half(std::nextafter(middle, 1e9f)) == bits);
        }
        previous = value;
    }
    constexpr float infinity = std::numeric_limits<float>::infinity();
    CHECK(meki::float_to_half(65519.996f) == 0x7bff && meki::float_to_half(65520.0f) == 0x7c00);
    CHECK(meki::float_to_half(3e38f) == 0x7c00 && meki::float_to_half(-infinity) == 0xfc00);
    CHECK(meki::float_to_half(1e-30f) == 0 && meki::float_to_half(-0.0f) == 0x8000);
    CHECK(std::isnan(meki::half_to_float(meki::float_to_half(std::numeric_limits<float>::quiet_NaN()))));
}

template <typename T>
void integers(DType dtype, std::int32_t zero_point) {
    constexpr float scale = 0.0371f;
    const ElementType type{dtype, meki::Quantization{scale, zero_point}};
    CHECK(type.size() == sizeof(T));
    std::vector<T> all;
    for (int q = std::numeric_limits<T>::min(); q <= std::numeric_limits<T>::max(); ++q) {
        all.push_back(static_cast<T>(q));
    }
    std::vector<float> values(all.size());
    decode(type, all.data(), all.size(), values.data());
    for (std::size_t i = 0; i < all.size(); ++i) {
        CHECK(values[i] == static_cast<float>(all[i] - zero_point) * scale);
    }
    std::vector<T> again(all.size());
    encode(type, values.data(), values.size(), again.data());
    CHECK(again == all);
    const float given[] = {1e9f, -1e9f, 0, std::numeric_limits<float>::quiet_NaN(), scale * 2.5f, scale * 3.5f};
    T found[6];
    encode(type, given, 6, found);
    CHECK(found[0] == std::numeric_limits<T>::max() && found[1] == std::numeric_limits<T>::min());
    CHECK(found[2] == zero_point && found[3] == std::numeric_limits<T>::min());
    const int steps[] = {2, 4};  // half to even
    for (int i = 0; i < 2; ++i) {
        CHECK(found[4 + i] == std::min<int>(steps[i] + zero_point, std::numeric_limits<T>::max()));
    }
    const meki::TensorData data(type, 5, meki::host_allocator());
    for (std::size_t i = 0; i < 5; ++i) {
        CHECK(static_cast<const T*>(data.data())[i] == zero_point);
    }
}

void host_inputs() {
    const meki::HostInput same(ElementType(), 3, meki::host_allocator());
    CHECK(same.values() == same.data());
    const meki::HostInput other({DType::float16, {}}, 3, meki::host_allocator());
    other.values()[1] = 1.5f;
    other.encode();
    const auto* halves = static_cast<const std::uint16_t*>(other.data());
    CHECK(halves[0] == 0 && halves[1] == 0x3e00 && halves[2] == 0);
    std::vector<std::uint16_t> filled(4);
    meki::fill({DType::float16, {}}, -100, 4, filled.data());
    CHECK(filled == std::vector<std::uint16_t>(4, 0xd640));
    std::vector<float> floats(2);
    meki::fill(ElementType(), -100, 2, floats.data());
    CHECK(floats == std::vector<float>(2, -100.0f));
}

}  // namespace

int main() {
    halves();
    integers<std::uint8_t>(DType::uint8, 128);
    integers<std::int8_t>(DType::int8, -3);
    integers<std::uint16_t>(DType::uint16, 31000);
    integers<std::int16_t>(DType::int16, 0);
    host_inputs();
    CHECK((ElementType{DType::uint8, meki::Quantization{1, 2}} != ElementType{DType::uint8, meki::Quantization{1, 3}}));
}
