// A ROM file: its header, parsed and checked (docs/rom-format.md).
//
// A profile of safetensors: an 8-byte little-endian header length, a JSON header padded with spaces
// up to a multiple of 4096 bytes, then the U8 tensor `rows` [num_rows, row_stride], token-major, and
// what the addressing needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "address.h"
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
    const Address& address() const { return *address_; }

    // The byte of the file where row `id` starts.
    std::uint64_t row_offset(std::uint64_t id) const { return data_start_ + id * row_stride_; }
    // Bytes from the start of the first of `count` consecutive rows to the end of the last one's data.
    std::size_t run_bytes(std::size_t count) const { return (count - 1) * row_stride_ + row_bytes_; }

    // As `Address::locate`. Throws Error if an id has no rows.
    std::size_t locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const;

    // Turns the `row_bytes` bytes of a row into `row_dim` floats, segment after segment. Returns null,
    // or the first segment whose bytes are damaged. Does not throw, so it may read from a map.
    const Segment* dequantize(const std::uint8_t* row, float* out) const noexcept;

private:
    // A tensor of the header; its bytes begin and end at these bytes of the file.
    struct Tensor {
        std::string dtype;
        std::vector<std::uint64_t> shape;
        std::uint64_t begin;
        std::uint64_t end;
    };
    using Tensors = std::map<std::string, Tensor>;

    void parse_header(const std::string& header, std::uint64_t header_end);
    void check_metadata(const JsonObject& metadata) const;
    Tensor parse_tensor(const std::string& name, const JsonObject& object, std::uint64_t header_end) const;
    void parse_rows(const Tensors& tensors);
    void parse_segments(const std::string& text);
    void parse_address(const JsonObject& metadata, const Tensors& tensors);
    // All elements of a tensor of one axis.
    template <typename T>
    std::vector<T> read_list(const Tensors& tensors, const char* name, const char* dtype) const;
    [[noreturn]] void fail(const std::string& what) const;

    File file_;
    std::uint64_t num_rows_ = 0;
    std::size_t row_stride_ = 0;
    std::size_t row_bytes_ = 0;
    std::size_t row_dim_ = 0;
    std::uint64_t data_start_ = 0;
    std::vector<Segment> segments_;
    std::string tokenizer_sha256_;
    std::unique_ptr<const Address> address_;
};

}  // namespace meki
