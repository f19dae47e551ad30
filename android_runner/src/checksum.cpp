#include "checksum.h"

#include <array>
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace meki {

namespace {

using Table = std::array<std::uint32_t, 256>;
constexpr std::uint32_t polynomial = 0xedb88320;

// Entry b of table k: what a byte b does to the checksum when k more bytes follow it.
constexpr std::array<Table, 8> make_tables() {
    std::array<Table, 8> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ ((crc & 1u) * polynomial);
        }
        tables[0][byte] = crc;
    }
    for (std::size_t k = 1; k < tables.size(); ++k) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][before & 255u];
        }
    }
    return tables;
}

constexpr std::array<Table, 8> tables = make_tables();

#if defined(__aarch64__) && defined(__linux__)

// Assembly, since compilers want the whole file to be for a processor that has these.
std::uint32_t crc32_by_instructions(const std::uint8_t* data, std::size_t num_bytes) {
    std::uint32_t crc = ~0u;
    for (; num_bytes >= 8; num_bytes -= 8, data += 8) {
        std::uint64_t word;
        std::memcpy(&word, data, sizeof word);
        __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    }
    for (; num_bytes > 0; --num_bytes, ++data) {
        __asm__(".arch_extension crc\n\tcrc32b %w0, %w0, %w1" : "+r"(crc) : "r"(static_cast<std::uint32_t>(*data)));
    }
    return ~crc;
}

const bool has_instructions = (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;

#endif

}  // namespace

std::uint32_t crc32_by_tables(const std::uint8_t* data, std::size_t num_bytes) {
    std::uint32_t crc = ~0u;
    for (; num_bytes >= 8; num_bytes -= 8, data += 8) {
        std::uint32_t low, high;
        std::memcpy(&low, data, sizeof low);
        std::memcpy(&high, data + sizeof low, sizeof high);
        low ^= crc;
        crc = tables[7][low & 255u] ^ tables[6][(low >> 8) & 255u] ^ tables[5][(low >> 16) & 255u] ^
              tables[4][low >> 24] ^ tables[3][high & 255u] ^ tables[2][(high >> 8) & 255u] ^
              tables[1][(high >> 16) & 255u] ^ tables[0][high >> 24];
    }
    for (; num_bytes > 0; --num_bytes, ++data) {
        crc = (crc >> 8) ^ tables[0][(crc ^ *data) & 255u];
    }
    return ~crc;
}

std::uint32_t crc32(const std::uint8_t* data, std::size_t num_bytes) {
#if defined(__aarch64__) && defined(__linux__)
    if (has_instructions) {
        return crc32_by_instructions(data, num_bytes);
    }
#endif
    return crc32_by_tables(data, num_bytes);
}

}  // namespace meki
