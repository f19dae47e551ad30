// zlib's CRC-32, by the published check value and by its definition, one bit at a time.

#include "checksum.h"

#include <vector>

#include "check.h"

namespace {

std::uint32_t bit_by_bit(const std::uint8_t* data, std::size_t num_bytes) {
    std::uint32_t crc = 0xffffffff;
    for (std::size_t i = 0; i < num_bytes; ++i) {
        for (unsigned bit = 0; bit < 8; ++bit) {
            const bool differs = ((crc ^ (static_cast<std::uint32_t>(data[i]) >> bit)) & 1u) != 0;
            crc = differs ? (crc >> 1) ^ 0xedb88320u : crc >> 1;
        }
    }
    return crc ^ 0xffffffffu;
}

}  // namespace

int main() {
    const char* const digits = "123456789";
    CHECK(meki::crc32(reinterpret_cast<const std::uint8_t*>(digits), 9) == 0xcbf43926u);
    std::vector<std::uint8_t> bytes(300);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<std::uint8_t>(i * i * 31 + i / 7);
    }
    for (std::size_t begin = 0; begin < 9; ++begin) {  // of every alignment
        for (std::size_t length = 0; begin + length <= bytes.size(); ++length) {
            const std::uint8_t* data = bytes.data() + begin;
            CHECK(meki::crc32(data, length) == bit_by_bit(data, length));
            CHECK(meki::crc32_by_tables(data, length) == bit_by_bit(data, length));
        }
    }
}
