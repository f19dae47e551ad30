// The CRC-32 of zlib, gzip and PNG (polynomial 0x04c11db7, bits reflected).
#pragma once

#include <cstddef>
#include <cstdint>

namespace meki {

// With the processor's own instructions on 64-bit Arm, where it has them; else eight bytes at a time by tables.
std::uint32_t crc32(const std::uint8_t* data, std::size_t num_bytes);

// The same by tables alone.
std::uint32_t crc32_by_tables(const std::uint8_t* data, std::size_t num_bytes);

}  // namespace meki
