#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "codec.h"

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr meki::Quantization unused{1, 0};

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
    CHECK(!codec.dequantize(bytes.data() + 1, out.size(), unused, out.data()));  // there are infinities among them
    for (unsigned half = 0; half < 0x10000; ++half) {
        if ((half & 0x7c00u) == 0x7c00u) {
            CHECK((half & 0x3ffu) != 0 ? std::isnan(out[half]) : std::isinf(out[half]));
            float one = 0;
            CHECK(!codec.dequantize(bytes.data() + 1 + 2 * half, 1, unused, &one));
        } else {
            CHECK(bits_of(out[half]) == bits_of(static_cast<float>(half_value(half))));
        }
    }
    std::vector<float> finite(0x7c00);
    CHECK(codec.dequantize(bytes.data() + 1, finite.size(), unused, finite.data()));
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
        CHECK(codec.dequantize(bytes.data(), 256, unused, out.data()));
        for (int q = -128; q < 128; ++q) {
            const float expected = static_cast<float>(q) * static_cast<float>(half_value(scale));
            CHECK(bits_of(out[static_cast<std::size_t>(q + 128)]) == bits_of(expected));
        }
    }
}

void int4_of_every_length(const char* name, std::size_t group_size) {
    const meki::Codec& codec = *meki::find_codec(name);
    for (std::size_t dim = 1; dim <= 200; ++dim) {
        const std::size_t num_groups = (dim + group_size - 1) / group_size;
        Bytes bytes;
        for (std::size_t group = 0; group < num_groups; ++group) {
            append_half(bytes, 0x3000u + static_cast<unsigned>(group) * 77u);
        }
        for (std::size_t i = 0; i < (dim + 1) / 2; ++i) {
            bytes.push_back(static_cast<std::uint8_t>(i * 37 + dim));
        }
        CHECK(codec.num_bytes(dim) == bytes.size());
        std::vector<float> out(dim + 1, 99.0f);
        CHECK(codec.dequantize(bytes.data(), dim, unused, out.data()));
        for (std::size_t i = 0; i < dim; ++i) {
            const unsigned byte = bytes[2 * num_groups + i / 2];
            const int nibble = static_cast<int>(i % 2 == 0 ? byte & 15u : byte >> 4);
            const float scale = static_cast<float>(half_value(0x3000u + static_cast<unsigned>(i / group_size) * 77u));
            CHECK(bits_of(out[i]) == bits_of(static_cast<float>(nibble >= 8 ? nibble - 16 : nibble) * scale));
        }
        CHECK(out[dim] == 99.0f);  // nothing is written past the end
    }
}

void every_bfloat() {
    const meki::Codec& codec = *meki::find_codec("bf16");
    Bytes bytes(1);
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
        append_half(bytes, bits);
    }
    std::vector<float> out(0x10000);
    CHECK(!codec.dequantize(bytes.data() + 1, out.size(), unused, out.data()));
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
        float one = 0;
        const bool finite = (bits & 0x7f80u) != 0x7f80u;
        CHECK(codec.dequantize(bytes.data() + 1 + 2 * bits, 1, unused, &one) == finite);
        CHECK(bits_of(out[bits]) == bits << 16);
    }
}

void every_static_integer() {
    const meki::Quantization quantization{0.0123456f, 30000};
    Bytes bytes(1);
    for (unsigned q = 0; q < 0x10000; ++q) {
        append_half(bytes, q);
    }
    std::vector<float> out(0x10000);
    CHECK(meki::find_codec("static16")->num_bytes(5) == 10 && meki::find_codec("static8")->num_bytes(5) == 5);
    CHECK(meki::find_codec("static16")->dequantize(bytes.data() + 1, out.size(), quantization, out.data()));
    for (int q = 0; q < 0x10000; ++q) {
        // In double the product is exact: 17 bits by 24.
        const double exact = (q - 30000) * static_cast<double>(quantization.scale);
        CHECK(bits_of(out[static_cast<std::size_t>(q)]) == bits_of(static_cast<float>(exact)));
    }
    const meki::Quantization bytewise{0.5f, 255};
    CHECK(meki::find_codec("static8")->dequantize(bytes.data() + 1, 1, bytewise, out.data()) && out[0] == -127.5f);
}

// Every float16 comes back; between two neighbours the nearer is taken, halfway the even one.
void halves() {
    std::uint16_t out = 0;
    for (unsigned half = 0; half < 0x7c00; ++half) {
        const auto value = static_cast<float>(half_value(half));
        const auto next = static_cast<float>(half_value(half + 1));  // 65536 after the largest
        const float middle = value + (next - value) / 2;
        for (const unsigned sign : {0u, 0x8000u}) {
            const float factor = sign != 0 ? -1.0f : 1.0f;
            const auto is = [&](float number, unsigned expected) {
                return meki::to_half(&number, 1, &out) == (expected < 0x7c00) && out == (expected | sign);
            };
            CHECK(is(factor * value, half));
            CHECK(is(factor * std::nextafter(middle, 0.0f), half));
            CHECK(is(factor * middle, half + half % 2));
            CHECK(is(factor * std::nextafter(middle, 1e6f), half + 1));
        }
    }
    for (const float large : {65520.0f, 1e30f, HUGE_VALF, std::nanf("")}) {
        CHECK(!meki::to_half(&large, 1, &out));
    }
    const float tiny[] = {1e-45f, 0x1p-26f, -0.0f};
    for (const float number : tiny) {
        CHECK(meki::to_half(&number, 1, &out) && (out & 0x7fffu) == 0);
    }
}

void damaged_bytes() {
    float out[64];
    for (const unsigned scale : {0x7c00u, 0x7e00u, 0x8000u, 0xbc00u, 0xfe00u}) {
        Bytes bytes;
        append_half(bytes, 0x3c00u);
        append_half(bytes, scale);
        bytes.resize(100);
        CHECK(!meki::find_codec("int4")->dequantize(bytes.data(), 64, unused, out));  // the second group's
        CHECK(meki::find_codec("int4")->dequantize(bytes.data(), 32, unused, out));
        CHECK(!meki::find_codec("int8")->dequantize(bytes.data() + 2, 4, unused, out));
    }
    const float elements[3] = {1.0f, -2.5f, HUGE_VALF};
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(elements);
    CHECK(meki::find_codec("fp32")->dequantize(bytes, 2, unused, out) && out[1] == -2.5f);
    CHECK(!meki::find_codec("fp32")->dequantize(bytes, 3, unused, out));
}

}  // namespace

int main() {
    every_half();
    every_int8();
    every_bfloat();
    int4_of_every_length("int4", 32);
    int4_of_every_length("int4_64", 64);
    every_static_integer();
    halves();
    damaged_bytes();
    CHECK(meki::find_codec("int5") == nullptr);
    CHECK(meki::codec_names() == "fp32, fp16, bf16, int8, int4, int4_64, static8, static16");
}
