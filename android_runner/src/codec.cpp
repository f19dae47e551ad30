#include "codec.h"

#include <cstring>

namespace meki {

namespace {

static_assert(sizeof(float) == 4, "float must be IEEE binary32");
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ROM files are little-endian and so must the machine be"
#endif

float bits_to_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// By hand and without a branch: portable, independent of the FPU's denormal mode, and vectorised.
float half_to_float(std::uint16_t half) {
    constexpr std::uint32_t rebias = 127 - 15;
    const std::uint32_t sign = (half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    const std::uint32_t shifted = magnitude << 13;
    const std::uint32_t normal = shifted + (rebias << 23);
    const std::uint32_t infinite = shifted | 0x7f800000u;
    // A subnormal half is its mantissa times 2^-24: exact, and a normal float32.
    const float tiny = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
    std::uint32_t subnormal;
    std::memcpy(&subnormal, &tiny, sizeof subnormal);
    std::uint32_t bits = magnitude >= 0x7c00u ? infinite : normal;
    bits = magnitude < 0x0400u ? subnormal : bits;
    return bits_to_float(bits | sign);
}

std::uint16_t load_half(const std::uint8_t* source) {
    std::uint16_t half;
    std::memcpy(&half, source, sizeof half);
    return half;
}

constexpr unsigned half_infinity = 0x7c00;
constexpr std::uint32_t float_infinity = 0x7f800000;

// A sound scale is positive or zero, and finite.
bool is_scale(std::uint16_t half) { return half < half_infinity; }

bool dequantize_fp32(const std::uint8_t* source, std::size_t dim, float* out) {
    std::memcpy(out, source, dim * sizeof(float));
    unsigned damaged = 0;
    for (std::size_t i = 0; i < dim; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, source + 4 * i, sizeof bits);
        damaged |= (bits & float_infinity) == float_infinity;
    }
    return damaged == 0;
}

bool dequantize_fp16(const std::uint8_t* source, std::size_t dim, float* out) {
    unsigned damaged = 0;
    for (std::size_t i = 0; i < dim; ++i) {
        const std::uint16_t half = load_half(source + 2 * i);
        out[i] = half_to_float(half);
        damaged |= (half & half_infinity) == half_infinity;
    }
    return damaged == 0;
}

bool dequantize_int8(const std::uint8_t* source, std::size_t dim, float* out) {
    const std::uint16_t half = load_half(source);
    const float scale = half_to_float(half);
    const std::uint8_t* elements = source + 2;
    for (std::size_t i = 0; i < dim; ++i) {
        out[i] = static_cast<float>(static_cast<std::int8_t>(elements[i])) * scale;
    }
    return is_scale(half);
}

// Two's complement of four bits, as a float.
float nibble_to_float(unsigned nibble) { return static_cast<float>(static_cast<int>(nibble ^ 8u) - 8); }

bool dequantize_int4(const std::uint8_t* source, std::size_t dim, float* out) {
    const std::size_t num_groups = (dim + int4_group - 1) / int4_group;
    const std::uint8_t* bytes = source + 2 * num_groups;
    bool sound = true;
    for (std::size_t group = 0; group < num_groups; ++group) {
        const std::uint16_t half = load_half(source + 2 * group);
        const float scale = half_to_float(half);
        sound &= is_scale(half);
        const std::size_t begin = group * int4_group;
        const std::size_t count = dim - begin < int4_group ? dim - begin : int4_group;
        const std::uint8_t* pairs = bytes + begin / 2;
        float* target = out + begin;
        for (std::size_t i = 0; i < count / 2; ++i) {
            target[2 * i] = nibble_to_float(pairs[i] & 0xfu) * scale;
            target[2 * i + 1] = nibble_to_float(pairs[i] >> 4) * scale;
        }
        if (count % 2 != 0) {
            target[count - 1] = nibble_to_float(pairs[count / 2] & 0xfu) * scale;
        }
    }
    return sound;
}

constexpr Codec codecs[] = {
    {"fp32", 32, 0, dequantize_fp32},
    {"fp16", 16, 0, dequantize_fp16},
    {"int8", 8, whole_segment, dequantize_int8},
    {"int4", 4, int4_group, dequantize_int4},
};

}  // namespace

std::size_t Codec::num_bytes(std::size_t dim) const {
    std::size_t num_scales = 0;
    if (scale_group == whole_segment) {
        num_scales = 1;
    } else if (scale_group != 0) {
        num_scales = (dim + scale_group - 1) / scale_group;
    }
    return 2 * num_scales + (dim * element_bits + 7) / 8;
}

const Codec* find_codec(const std::string& name) {
    for (const Codec& codec : codecs) {
        if (name == codec.name) {
            return &codec;
        }
    }
    return nullptr;
}

}  // namespace meki
