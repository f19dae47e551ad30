// Microseconds since the program started, on the monotonic clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace meki {

inline std::uint64_t now_us() {
    static const auto start = std::chrono::steady_clock::now();
    const auto elapsed = std::chrono::steady_clock::now() - start;
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(elapsed).count());
}

}  // namespace meki
