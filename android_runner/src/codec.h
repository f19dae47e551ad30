// How the elements of a ROM segment are stored, and how they become float32 (docs/rom-format.md).
//
// Scales (float16) come first, then the elements, with no alignment at all. A dequantized value is
// float32(q) * float32(scale), one rounding, so that every reader gets the same bits. Static codecs have no
// scales of their own: what their unsigned integers mean is said once, in the file's header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "quantization.h"

namespace meki {

struct Codec {
    const char* name;
    std::size_t element_bits;
    // Elements that share one scale; 0: no scales; whole_segment: one scale for all.
    std::size_t scale_group;
    // The header's quantization says what the elements mean.
    bool is_static;
    // The elements are float16: a graph that takes those gets them as they are.
    bool is_half;
    // Turns `dim` encoded elements at `source` (any alignment) into float32; only static codecs use the
    // quantization. Returns false if the bytes are damaged: an element is NaN or infinite, or a scale is
    // that or negative.
    bool (*dequantize)(const std::uint8_t* source, std::size_t dim, const Quantization& quantization, float* out);

    // Bytes of an encoded segment of `dim` elements, scales included.
    std::size_t num_bytes(std::size_t dim) const;
};

constexpr std::size_t whole_segment = SIZE_MAX;

// The codec called `name`, or null.
const Codec* find_codec(const std::string& name);
// The names of all, with commas between them.
std::string codec_names();

// `count` numbers as the nearest float16, half to even. Returns false if one is infinite as such, or NaN.
bool to_half(const float* values, std::size_t count, std::uint16_t* out);
// `count` float16 at `source` (any alignment). Returns false if one is infinite or NaN.
bool copy_halves(const std::uint8_t* source, std::size_t count, std::uint16_t* out);

}  // namespace meki
