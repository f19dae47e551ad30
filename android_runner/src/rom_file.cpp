#include "rom_file.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "strict_json.h"

namespace meki {

namespace {

constexpr std::uint64_t max_header_bytes = 100'000'000;  // the safetensors library's own limit
constexpr std::uint64_t max_row_stride = std::uint64_t{1} << 30;
constexpr const char* fix = "copy the file again, or regenerate it with `meki-edge reparam` or `meki-edge export`";

bool comes_after(std::int64_t layer, std::int64_t memory, const Segment& other) {
    return layer != other.layer ? layer > other.layer : memory > other.memory;
}

}  // namespace

RomFile::RomFile(const std::string& path) : file_(path) {
    std::uint64_t header_bytes = 0;
    if (read_at(file_.descriptor(), &header_bytes, sizeof header_bytes, 0, path) < sizeof header_bytes) {
        fail("not a safetensors file: " + std::to_string(file_.size()) + " bytes is too short for a header");
    }
    if (header_bytes > std::min(max_header_bytes, file_.size() - sizeof header_bytes)) {
        fail("the header claims " + std::to_string(header_bytes) + " bytes but the file has " +
             std::to_string(file_.size()));
    }
    std::string header(static_cast<std::size_t>(header_bytes), '\0');
    if (read_at(file_.descriptor(), header.data(), header.size(), sizeof header_bytes, path) < header.size()) {
        fail("the file ends inside the header");
    }
    parse_header(header, sizeof header_bytes + header_bytes);
}

void RomFile::parse_header(const std::string& header, std::uint64_t header_end) {
    const Json parsed = parse_json(header, file_.path(), fix);
    const JsonObject root(parsed, file_.path(), fix);
    if (!root.has("__metadata__")) {
        fail("not a ROM file: the header has no '__metadata__'");
    }
    parse_metadata(root.object("__metadata__"));
    for (const auto& [name, unused] : parsed.items()) {
        if (name != "__metadata__" && name != "rows") {
            fail("the file holds other tensors than 'rows': " + name);
        }
    }
    parse_rows(root.object("rows"), header_end);
    parse_segments(root.object("__metadata__").text("segments"));
}

void RomFile::parse_metadata(const JsonObject& metadata) {
    if (!metadata.has("format") || metadata.text("format") != "meki-edge-rom") {
        fail("not a ROM file: format is " + (metadata.has("format") ? "'" + metadata.text("format") + "'" : "absent") +
             ", not 'meki-edge-rom'");
    }
    for (const char* key : {"version", "addressing", "segments", "tokenizer_sha256", "source_sha256"}) {
        if (!metadata.has(key)) {
            fail(std::string("the header lacks '") + key + "'");
        }
    }
    if (metadata.text("version") != "1") {
        fail("ROM version '" + metadata.text("version") + "', this reader knows 1");
    }
    if (metadata.text("addressing") != "identity") {
        fail("unknown addressing '" + metadata.text("addressing") + "'");
    }
    tokenizer_sha256_ = metadata.text("tokenizer_sha256");
}

void RomFile::parse_rows(const JsonObject& rows, std::uint64_t header_end) {
    rows.allow_only({"dtype", "shape", "data_offsets"});
    if (rows.text("dtype") != "U8") {
        fail("the tensor 'rows' is " + rows.text("dtype") + ", not U8");
    }
    const auto pair = [&](const char* key, const char* meaning) {
        const Json& list = rows.list(key);
        if (list.size() != 2 || !list[0].is_number_unsigned() || !list[1].is_number_unsigned()) {
            fail(std::string("the tensor 'rows' has ") + key + " " + list.dump() + ", not " + meaning);
        }
        return std::make_pair(list[0].get<std::uint64_t>(), list[1].get<std::uint64_t>());
    };
    const auto [num_rows, row_stride] = pair("shape", "[num_rows, row_stride]");
    const auto [begin, end] = pair("data_offsets", "[begin, end]");
    if (num_rows == 0 || row_stride == 0 || row_stride > max_row_stride) {
        fail("the tensor 'rows' has shape " + rows.list("shape").dump() + ": it needs a row, and rows of 1 to " +
             std::to_string(max_row_stride) + " bytes");
    }
    if (end < begin || num_rows > (end - begin) / row_stride || num_rows * row_stride != end - begin) {
        fail("the tensor 'rows' of shape " + rows.list("shape").dump() + " does not fit its byte range " +
             rows.list("data_offsets").dump());
    }
    if (end != file_.size() - header_end) {
        fail("the rows end at byte " + std::to_string(end) + " of the data but the file holds " +
             std::to_string(file_.size() - header_end));
    }
    num_rows_ = num_rows;
    row_stride_ = static_cast<std::size_t>(row_stride);
    data_start_ = header_end + begin;
    if (data_start_ % page_bytes != 0) {
        fail("the rows start at byte " + std::to_string(data_start_) + ", which is not a multiple of " +
             std::to_string(page_bytes));
    }
}

void RomFile::parse_segments(const std::string& text) {
    const std::string where = file_.path() + ": segments";
    const Json listed = parse_json(text, where, fix);
    if (!listed.is_array() || listed.empty()) {
        fail("'segments' is not a list with at least one segment");
    }
    for (std::size_t index = 0; index < listed.size(); ++index) {
        const JsonObject object(listed[index], where + "[" + std::to_string(index) + "]", fix);
        object.allow_only({"layer", "memory", "offset", "dim", "codec"});
        const std::int64_t layer = object.integer("layer");
        const std::int64_t memory = object.integer("memory");
        if (layer < -1 || memory < 0 || (!segments_.empty() && !comes_after(layer, memory, segments_.back()))) {
            fail("segment " + std::to_string(index) + " (layer " + std::to_string(layer) + ", memory " +
                 std::to_string(memory) + ") is out of order");
        }
        const Codec* codec = find_codec(object.text("codec"));
        if (codec == nullptr) {
            object.fail("unknown codec '" + object.text("codec") + "' (known: fp32, fp16, int8, int4)");
        }
        const std::int64_t offset = object.integer("offset");
        const std::int64_t dim = object.integer("dim");
        const auto stride = static_cast<std::int64_t>(row_stride_);
        // No codec packs more than two elements into a byte: bounds dim before it is multiplied.
        const bool sane = dim >= 1 && dim <= 2 * stride && offset >= static_cast<std::int64_t>(row_bytes_) &&
                          offset <= stride;
        if (!sane || codec->num_bytes(static_cast<std::size_t>(dim)) > static_cast<std::size_t>(stride - offset)) {
            fail("segment " + std::to_string(index) + " overlaps its neighbour or does not fit the row of " +
                 std::to_string(row_stride_) + " bytes");
        }
        const Segment segment{layer, memory, static_cast<std::size_t>(offset),
                              static_cast<std::size_t>(dim), codec};
        row_bytes_ = segment.offset + codec->num_bytes(segment.dim);
        row_dim_ += segment.dim;
        segments_.push_back(segment);
    }
}

const Segment* RomFile::dequantize(const std::uint8_t* row, float* out) const noexcept {
    const Segment* damaged = nullptr;
    for (const Segment& segment : segments_) {
        if (!segment.codec->dequantize(row + segment.offset, segment.dim, out) && damaged == nullptr) {
            damaged = &segment;
        }
        out += segment.dim;
    }
    return damaged;
}

void RomFile::fail(const std::string& what) const { throw Error(what, file_.path(), fix); }

}  // namespace meki
