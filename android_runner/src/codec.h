// How the elements of a ROM segment are stored, and how they become float32 (docs/rom-format.md).
//
// Scales (float16) come first, then the elements, with no alignment at all. A dequantized value is
// float32(q) * float32(scale), one rounding, so that every reader gets the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace meki {

struct Codec {
    const char* name;
    std::size_t element_bits;
    // Elements that share one scale; 0: no scales; whole_segment: one scale for all.
    std::size_t scale_group;
    // Turns `dim` encoded elements at `source` (any alignment) into float32. Returns false if the bytes
    // are damaged: an element is NaN or infinite, or a scale is that or negative.
    bool (*dequantize)(const std::uint8_t* source, std::size_t dim, float* out);

    // Bytes of an encoded segment of `dim` elements, scales included.
    std::size_t num_bytes(std::size_t dim) const;
};

constexpr std::size_t whole_segment = SIZE_MAX;
constexpr std::size_t int4_group = 32;

// The codec called `name`, or null.
const Codec* find_codec(const std::string& name);

}  // namespace meki
