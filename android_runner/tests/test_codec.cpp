#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "codec.h"

namespace {

using Bytes = std::vector<std::uint8_t>;

// float16 by its definition, in double: independent of the bit tricks under test.
double half_value(unsigned half) {
    const int exponent = static_cast<int>((half >> 10) & 31u);
    const double mantissa = half & 1023u;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return (half & 0x8000u) != 0 ? -magnitude : magnitude;
}

void append_half(Bytes& bytes, unsigned half) {
    bytes.push_back(static_cast<std::uint8_t>(half & 255u));
    bytes.push_back(static_cast<std::uint8_t>(half >> 8));
}

std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

void every_half() {
    const meki::Codec& codec = *meki::find_codec("fp16");
    Bytes bytes(1);  // an odd start: segments have no alignment
    for (unsigned half = 0; half < 0x10000; ++half) {
        append_half(bytes, half);
    }
    std::vector<float> out(0x10000);
    CHECK(!codec.dequantize(bytes.data() + 1, out.size(), out.data()));  // there are infinities among them
    for (unsigned half = 0; half < 0x10000; ++half) {
        if ((half & 0x7c00u) == 0x7c00u) {
            CHECK((half & 0x3ffu) != 0 ? std::isnan(out[half]) : std::isinf(out[half]));
            float one = 0;
            CHECK(!codec.dequantize(bytes.data() + 1 + 2 * half, 1, &one));
        } else {
            CHECK(bits_of(out[half]) == bits_of(static_cast<float>(half_value(half))));
        }
    }
    std::vector<float> finite(0x7c00);
    CHECK(codec.dequantize(bytes.data() + 1, finite.size(), finite.data()));
}

void every_int8() {
    const meki::Codec& codec = *meki::find_codec("int8");
    for (const unsigned scale : {0x0000u, 0x0001u, 0x03ffu, 0x2e66u, 0x3c00u, 0x7bffu}) {
        Bytes bytes;
        append_half(bytes, scale);
        for (int q = -128; q < 128; ++q) {
            bytes.push_back(static_cast<std::uint8_t>(q));
        }
        std::vector<float> out(256);
        CHECK(codec.num_bytes(256) == bytes.size());
        CHECK(codec.dequantize(bytes.data(), 256, out.data()));
        for (int q = -128; q < 128; ++q) {
            const float expected = static_cast<float>(q) * static_cast<float>(half_value(scale));
            CHECK(bits_of(out[static_cast<std::size_t>(q + 128)]) == bits_of(expected));
        }
    }
}

void int4_of_every_length() {
    const meki::Codec& codec = *meki::find_codec("int4");
    for (std::size_t dim = 1; dim <= 100; ++dim) {
        const std::size_t num_groups = (dim + 31) / 32;
        Bytes bytes;
        for (std::size_t group = 0; group < num_groups; ++group) {
            append_half(bytes, 0x3000u + static_cast<unsigned>(group) * 77u);
        }
        for (std::size_t i = 0; i < (dim + 1) / 2; ++i) {
            bytes.push_back(static_cast<std::uint8_t>(i * 37 + dim));
        }
        CHECK(codec.num_bytes(dim) == bytes.size());
        std::vector<float> out(dim + 1, 99.0f);
        CHECK(codec.dequantize(bytes.data(), dim, out.data()));
        for (std::size_t i = 0; i < dim; ++i) {
            const unsigned byte = bytes[2 * num_groups + i / 2];
            const int nibble = static_cast<int>(i % 2 == 0 ? byte & 15u : byte >> 4);
            const float scale = static_cast<float>(half_value(0x3000u + static_cast<unsigned>(i / 32) * 77u));
            CHECK(bits_of(out[i]) == bits_of(static_cast<float>(nibble >= 8 ? nibble - 16 : nibble) * scale));
        }
        CHECK(out[dim] == 99.0f);  // nothing is written past the end
    }
}

void damaged_bytes() {
    float out[64];
    for (const unsigned scale : {0x7c00u, 0x7e00u, 0x8000u, 0xbc00u, 0xfe00u}) {
        Bytes bytes;
        append_half(bytes, 0x3c00u);
        append_half(bytes, scale);
        bytes.resize(100);
        CHECK(!meki::find_codec("int4")->dequantize(bytes.data(), 64, out));  // the second group's
        CHECK(meki::find_codec("int4")->dequantize(bytes.data(), 32, out));
        CHECK(!meki::find_codec("int8")->dequantize(bytes.data() + 2, 4, out));
    }
    const float elements[3] = {1.0f, -2.5f, HUGE_VALF};
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(elements);
    CHECK(meki::find_codec("fp32")->dequantize(bytes, 2, out) && out[1] == -2.5f);
    CHECK(!meki::find_codec("fp32")->dequantize(bytes, 3, out));
}

}  // namespace

int main() {
    every_half();
    every_int8();
    int4_of_every_length();
    damaged_bytes();
    CHECK(meki::find_codec("int5") == nullptr);
}
