// A ROM file: its header, parsed and checked (docs/rom-format.md).
//
// A profile of safetensors: an 8-byte little-endian header length, a JSON header padded with spaces
// up to a multiple of 4096 bytes, then one U8 tensor `rows` [num_rows, row_stride], token-major.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "codec.h"
#include "file.h"

namespace meki {

class JsonObject;

constexpr std::size_t page_bytes = 4096;

// The part of a row that belongs to one memory of one layer (layer -1: the token embedding).
struct Segment {
    std::int64_t layer;
    std::int64_t memory;
    std::size_t offset;  // bytes from the start of the row
    std::size_t dim;     // elements
    const Codec* codec;
};

class RomFile {
public:
    // Throws Error if `path` is not a ROM file that this reader knows, or is damaged.
    explicit RomFile(const std::string& path);

    const File& file() const { return file_; }
    std::uint64_t num_rows() const { return num_rows_; }
    // Bytes from one row to the next.
    std::size_t row_stride() const { return row_stride_; }
    // Bytes of a row that carry data; the rest of the stride is padding.
    std::size_t row_bytes() const { return row_bytes_; }
    // Elements of a dequantized row, all segments together.
    std::size_t row_dim() const { return row_dim_; }
    const std::string& tokenizer_sha256() const { return tokenizer_sha256_; }

    // The byte of the file where row `id` starts.
    std::uint64_t row_offset(std::uint64_t id) const { return data_start_ + id * row_stride_; }

    // Turns the `row_bytes` bytes of a row into `row_dim` floats, segment after segment. Returns null,
    // or the first segment whose bytes are damaged. Does not throw, so it may read from a map.
    const Segment* dequantize(const std::uint8_t* row, float* out) const noexcept;

private:
    void parse_header(const std::string& header, std::uint64_t header_end);
    void parse_metadata(const JsonObject& metadata);
    void parse_rows(const JsonObject& rows, std::uint64_t header_end);
    void parse_segments(const std::string& text);
    [[noreturn]] void fail(const std::string& what) const;

    File file_;
    std::uint64_t num_rows_ = 0;
    std::size_t row_stride_ = 0;
    std::size_t row_bytes_ = 0;
    std::size_t row_dim_ = 0;
    std::uint64_t data_start_ = 0;
    std::vector<Segment> segments_;
    std::string tokenizer_sha256_;
};

}  // namespace meki
