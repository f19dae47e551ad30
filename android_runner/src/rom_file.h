// A ROM file: its header, parsed and checked (docs/rom-format.md).
//
// A profile of safetensors: an 8-byte little-endian header length, a JSON header padded with spaces
// up to a multiple of 4096 bytes, then the U8 tensor `rows` [num_rows, row_stride], token-major, and
// what the addressing needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "address.h"
#include "codec.h"
#include "quantization.h"
#include "safetensors.h"

namespace meki {

constexpr std::size_t page_bytes = 4096;

// The part of a row that belongs to one memory of one layer (layer -1: the token embedding).
struct Segment {
    std::int64_t layer;
    std::int64_t memory;
    std::size_t offset;  // bytes from the start of the row
    std::size_t dim;     // elements
    const Codec* codec;
};

// What a reader wants the elements of rows as. `raw`: the integers of a static codec, as they are in the file.
enum class RowElement { float32, float16, raw };

class RomFile {
public:
    // Throws Error if `path` is not a ROM file that this reader knows, or is damaged.
    explicit RomFile(const std::string& path);

    const File& file() const { return container_.file(); }
    std::uint64_t num_rows() const { return num_rows_; }
    // Bytes from one row to the next.
    std::size_t row_stride() const { return row_stride_; }
    // Bytes of a row that carry data; the rest of the stride is padding.
    std::size_t row_bytes() const { return row_bytes_; }
    // Elements of a dequantized row, all segments together.
    std::size_t row_dim() const { return row_dim_; }
    const std::vector<Segment>& segments() const { return segments_; }
    const std::string& tokenizer_sha256() const { return tokenizer_sha256_; }
    const Address& address() const { return *address_; }
    // What the integers of all rows mean; null unless their codec is static.
    const Quantization* quantization() const { return is_static() ? &quantization_ : nullptr; }
    // Bytes of an element of a static codec: 1 (unsigned) or 2.
    std::size_t raw_element_bytes() const { return segments_.front().codec->element_bits / 8; }
    bool has_checksums() const { return container_.has("checksums"); }
    // One of each row. Throws Error if there are none, or if what the addressing needs does not match its own.
    std::vector<std::uint32_t> read_checksums() const;

    // The byte of the file where row `id` starts.
    std::uint64_t row_offset(std::uint64_t id) const { return data_start_ + id * row_stride_; }
    // Bytes from the start of the first of `count` consecutive rows to the end of the last one's data.
    std::size_t run_bytes(std::size_t count) const { return (count - 1) * row_stride_ + row_bytes_; }

    // As `Address::locate`. Throws Error if an id has no rows.
    std::size_t locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const;

    // Bytes of a row's elements as `element`; raw is for static codecs only.
    std::size_t delivered_bytes(RowElement element) const;
    // Turns the `row_bytes` bytes of a row into its elements, segment after segment. `floats`, room for
    // `row_dim` of them, is used only for float16. Returns null, or the first segment whose bytes are damaged
    // or do not fit a float16. Does not throw, so it may read from a map.
    const Segment* deliver(const std::uint8_t* row, RowElement element, float* floats, void* out) const noexcept;

private:
    void check_metadata() const;
    void check_tensors() const;
    void parse_rows();
    void parse_segments();
    void check_static(const Segment& segment) const;
    void parse_quantization();
    void parse_address();
    void check_checksums() const;
    // The tensor that the addressing needs; null: none.
    const char* address_tensor() const;
    bool is_static() const { return segments_.front().codec->is_static; }
    const Segment* dequantize(const std::uint8_t* row, float* out) const noexcept;

    Safetensors container_;
    std::uint64_t num_rows_ = 0;
    std::size_t row_stride_ = 0;
    std::size_t row_bytes_ = 0;
    std::size_t row_dim_ = 0;
    std::uint64_t data_start_ = 0;
    std::vector<Segment> segments_;
    Quantization quantization_{1, 0};
    std::string tokenizer_sha256_;
    std::unique_ptr<const Address> address_;
};

}  // namespace meki
