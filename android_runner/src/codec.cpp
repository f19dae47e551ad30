#include "codec.h"

#include <cstring>

#include "half.h"

namespace meki {

namespace {

static_assert(sizeof(float) == 4, "float must be IEEE binary32");
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ROM files are little-endian and so must the machine be"
#endif

template <typename T>
T load(const std::uint8_t* source) {
    T value;
    std::memcpy(&value, source, sizeof value);
    return value;
}

constexpr unsigned half_infinity = 0x7c00;
constexpr std::uint32_t float_infinity = 0x7f800000;

// A sound scale is positive or zero, and finite.
bool is_scale(std::uint16_t half) { return half < half_infinity; }

bool dequantize_fp32(const std::uint8_t* source, std::size_t dim, const Quantization&, float* out) {
    std::memcpy(out, source, dim * sizeof(float));
    unsigned damaged = 0;
    for (std::size_t i = 0; i < dim; ++i) {
        const std::uint32_t bits = load<std::uint32_t>(source + 4 * i);
        damaged |= (bits & float_infinity) == float_infinity;
    }
    return damaged == 0;
}

bool dequantize_fp16(const std::uint8_t* source, std::size_t dim, const Quantization&, float* out) {
    unsigned damaged = 0;
    for (std::size_t i = 0; i < dim; ++i) {
        const std::uint16_t half = load<std::uint16_t>(source + 2 * i);
        out[i] = half_to_float(half);
        damaged |= (half & half_infinity) == half_infinity;
    }
    return damaged == 0;
}

bool dequantize_bf16(const std::uint8_t* source, std::size_t dim, const Quantization&, float* out) {
    unsigned damaged = 0;
    for (std::size_t i = 0; i < dim; ++i) {
        const std::uint32_t bits = std::uint32_t{load<std::uint16_t>(source + 2 * i)} << 16;
        out[i] = bits_to_float(bits);
        damaged |= (bits & float_infinity) == float_infinity;
    }
    return damaged == 0;
}

bool dequantize_int8(const std::uint8_t* source, std::size_t dim, const Quantization&, float* out) {
    const std::uint16_t half = load<std::uint16_t>(source);
    const float scale = half_to_float(half);
    const std::uint8_t* elements = source + 2;
    for (std::size_t i = 0; i < dim; ++i) {
        out[i] = static_cast<float>(static_cast<std::int8_t>(elements[i])) * scale;
    }
    return is_scale(half);
}

// Two's complement of four bits, as a float.
float nibble_to_float(unsigned nibble) { return static_cast<float>(static_cast<int>(nibble ^ 8u) - 8); }

template <std::size_t group_size>
bool dequantize_int4(const std::uint8_t* source, std::size_t dim, const Quantization&, float* out) {
    const std::size_t num_groups = (dim + group_size - 1) / group_size;
    const std::uint8_t* bytes = source + 2 * num_groups;
    bool sound = true;
    for (std::size_t group = 0; group < num_groups; ++group) {
        const std::uint16_t half = load<std::uint16_t>(source + 2 * group);
        const float scale = half_to_float(half);
        sound &= is_scale(half);
        const std::size_t begin = group * group_size;
        const std::size_t count = dim - begin < group_size ? dim - begin : group_size;
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

template <typename T>
bool dequantize_static(const std::uint8_t* source, std::size_t dim, const Quantization& quantization, float* out) {
    for (std::size_t i = 0; i < dim; ++i) {
        const std::int32_t centred = std::int32_t{load<T>(source + sizeof(T) * i)} - quantization.zero_point;
        out[i] = static_cast<float>(centred) * quantization.scale;
    }
    return true;
}

constexpr Codec codecs[] = {
    {"fp32", 32, 0, false, false, dequantize_fp32},
    {"fp16", 16, 0, false, true, dequantize_fp16},
    {"bf16", 16, 0, false, false, dequantize_bf16},
    {"int8", 8, whole_segment, false, false, dequantize_int8},
    {"int4", 4, 32, false, false, dequantize_int4<32>},
    {"int4_64", 4, 64, false, false, dequantize_int4<64>},
    {"static8", 8, 0, true, false, dequantize_static<std::uint8_t>},
    {"static16", 16, 0, true, false, dequantize_static<std::uint16_t>},
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

std::string codec_names() {
    std::string names;
    for (const Codec& codec : codecs) {
        names += (names.empty() ? "" : ", ") + std::string(codec.name);
    }
    return names;
}

bool to_half(const float* values, std::size_t count, std::uint16_t* out) {
    unsigned infinite = 0;
    for (std::size_t i = 0; i < count; ++i) {
        out[i] = float_to_half(values[i]);
        infinite |= (out[i] & half_infinity) == half_infinity;
    }
    return infinite == 0;
}

bool copy_halves(const std::uint8_t* source, std::size_t count, std::uint16_t* out) {
    std::memcpy(out, source, count * sizeof *out);
    unsigned damaged = 0;
    for (std::size_t i = 0; i < count; ++i) {
        damaged |= (out[i] & half_infinity) == half_infinity;
    }
    return damaged == 0;
}

}  // namespace meki
