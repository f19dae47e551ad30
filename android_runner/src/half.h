// float16 as bits, to and from float32: by hand and without a branch, so portable, independent of the FPU's
// denormal mode, and vectorised in loops.
#pragma once

#include <cstdint>
#include <cstring>

namespace meki {

inline std::uint32_t float_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float bits_to_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// By masks: GCC makes a branch of `?:` where a floating-point operation is on one side, and then no vectors.
inline std::uint32_t select(bool condition, std::uint32_t yes, std::uint32_t no) {
    const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

inline float half_to_float(std::uint16_t half) {
    constexpr std::uint32_t rebias = 127 - 15;
    const std::uint32_t sign = (half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    const std::uint32_t shifted = magnitude << 13;
    const std::uint32_t normal = shifted + (rebias << 23);
    const std::uint32_t infinite = shifted | 0x7f800000u;
    // A subnormal half is its mantissa times 2^-24: exact, and a normal float32.
    const std::uint32_t subnormal = float_bits(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
    const std::uint32_t finite = select(magnitude < 0x0400u, subnormal, normal);
    return bits_to_float(select(magnitude >= 0x7c00u, infinite, finite) | sign);
}

// Rounds to the nearest, ties to even; what is too large becomes infinite, and NaN stays NaN.
inline std::uint16_t float_to_half(float value) {
    constexpr std::uint32_t rebias = (127u - 15u) << 23;
    const std::uint32_t bits = float_bits(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    // Half a unit of the last place that stays, less a little where that place is even.
    const std::uint32_t normal = (magnitude - rebias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Added to 0.5, the units of a subnormal half are the last places of the sum, which the FPU rounds.
    const std::uint32_t subnormal = float_bits(bits_to_float(magnitude) + 0.5f) - float_bits(0.5f);
    std::uint32_t half = select(magnitude < 0x38800000u, subnormal, normal);
    half = select(magnitude >= 0x47800000u, 0x7c00u, half);
    half = select(magnitude > 0x7f800000u, 0x7e00u, half);
    return static_cast<std::uint16_t>(half | sign);
}

}  // namespace meki
