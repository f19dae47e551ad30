// How integers stand for reals: real = (q - zero_point) * scale, for all elements of a tensor or a ROM file.
#pragma once

#include <cstdint>

namespace meki {

struct Quantization {
    float scale;
    std::int32_t zero_point;

    friend bool operator==(const Quantization& a, const Quantization& b) {
        return a.scale == b.scale && a.zero_point == b.zero_point;
    }
    friend bool operator!=(const Quantization& a, const Quantization& b) { return !(a == b); }
};

}  // namespace meki
