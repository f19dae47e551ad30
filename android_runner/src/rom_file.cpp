#include "rom_file.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "rom_address.h"
#include "strict_json.h"

namespace meki {

namespace {

constexpr std::uint64_t max_header_bytes = 100'000'000;  // the safetensors library's own limit
constexpr std::uint64_t max_row_stride = std::uint64_t{1} << 30;
constexpr const char* fix = "copy the file again, or regenerate it with `meki-edge reparam` or `meki-edge export`";

// Bytes of an element of the dtypes that a ROM file may hold; 0 for all others.
std::uint64_t element_bytes(const std::string& dtype) {
    if (dtype == "U8") {
        return 1;
    }
    return dtype == "I32" ? 4 : dtype == "I64" ? 8 : 0;
}

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
    const JsonObject metadata = root.object("__metadata__");
    for (const auto& [key, unused] : root.at("__metadata__").items()) {
        metadata.text(key.c_str());  // safetensors: strings only
    }
    check_metadata(metadata);
    Tensors tensors;
    std::uint64_t end = header_end;
    for (const auto& [name, unused] : parsed.items()) {
        if (name != "__metadata__") {
            end = std::max(end, tensors.emplace(name, parse_tensor(name, root.object(name.c_str()), header_end))
                                    .first->second.end);
        }
    }
    if (end != file_.size()) {
        fail("the tensors end at byte " + std::to_string(end) + " but the file has " + std::to_string(file_.size()));
    }
    parse_rows(tensors);
    parse_segments(metadata.text("segments"));
    parse_address(metadata, tensors);
    tokenizer_sha256_ = metadata.text("tokenizer_sha256");
}

void RomFile::check_metadata(const JsonObject& metadata) const {
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
}

RomFile::Tensor RomFile::parse_tensor(const std::string& name, const JsonObject& object,
                                      std::uint64_t header_end) const {
    const auto sizes = [&](const char* key) {
        std::vector<std::uint64_t> parsed;
        for (const Json& value : object.list(key)) {
            if (!value.is_number_unsigned()) {
                fail("the tensor '" + name + "' has " + key + " " + object.list(key).dump() + ", not sizes");
            }
            parsed.push_back(value.get<std::uint64_t>());
        }
        return parsed;
    };
    Tensor tensor{object.text("dtype"), sizes("shape"), 0, 0};
    std::uint64_t num_bytes = element_bytes(tensor.dtype);
    if (num_bytes == 0) {
        fail("the tensor '" + name + "' is " + tensor.dtype + ", which no ROM file has");
    }
    const std::vector<std::uint64_t> offsets = sizes("data_offsets");
    bool fits = offsets.size() == 2 && offsets[0] <= offsets[1];
    for (const std::uint64_t size : tensor.shape) {
        fits = fits && (num_bytes == 0 || size <= UINT64_MAX / num_bytes);
        num_bytes *= size;
    }
    if (!fits || offsets[1] - offsets[0] != num_bytes) {
        fail("the tensor '" + name + "' of shape " + object.list("shape").dump() + " does not fit its byte range " +
             object.list("data_offsets").dump());
    }
    if (offsets[1] > file_.size() - header_end) {
        fail("the tensor '" + name + "' ends at byte " + std::to_string(offsets[1]) +
             " of the data but the file holds " + std::to_string(file_.size() - header_end));
    }
    tensor.begin = header_end + offsets[0];
    tensor.end = header_end + offsets[1];
    return tensor;
}

void RomFile::parse_rows(const Tensors& tensors) {
    const auto found = tensors.find("rows");
    if (found == tensors.end()) {
        fail("the tensor 'rows' is missing");
    }
    const Tensor& rows = found->second;
    if (rows.dtype != "U8") {
        fail("the tensor 'rows' is " + rows.dtype + ", not U8");
    }
    if (rows.shape.size() != 2 || rows.shape[0] == 0 || rows.shape[1] == 0 || rows.shape[1] > max_row_stride) {
        fail("the tensor 'rows' has shape " + Json(rows.shape).dump() + ", not [num_rows, row_stride]: it needs a row, "
             "and rows of 1 to " + std::to_string(max_row_stride) + " bytes");
    }
    num_rows_ = rows.shape[0];
    row_stride_ = static_cast<std::size_t>(rows.shape[1]);
    data_start_ = rows.begin;
    if (data_start_ % page_bytes != 0) {
        fail("the rows start at byte " + std::to_string(data_start_) + ", which is not a multiple of " +
             std::to_string(page_bytes));
    }
    for (const auto& [name, tensor] : tensors) {
        if (&tensor != &rows && tensor.begin < rows.end) {
            fail("the rows are not the first tensor: '" + name + "' begins before they end");
        }
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

void RomFile::parse_address(const JsonObject& metadata, const Tensors& tensors) {
    const std::string kind = metadata.text("addressing");
    const std::string where = file_.path() + ": addressing_parameters";
    const Json parsed =
        parse_json(metadata.has("addressing_parameters") ? metadata.text("addressing_parameters") : "{}", where, fix);
    const JsonObject parameters(parsed, where, fix);
    std::string used;
    if (kind == IdentityAddress::name) {
        address_ = std::make_unique<IdentityAddress>(num_rows_);
    } else if (kind == RaggedAddress::name) {
        used = "offsets";
        address_ = make_ragged(parameters, read_list<std::int64_t>(tensors, "offsets", "I64"), num_rows_);
    } else if (kind == NgramHashAddress::name) {
        used = "token_map";
        address_ = make_ngram_hash(parameters, read_list<std::int32_t>(tensors, "token_map", "I32"), num_rows_);
    } else {
        fail("unknown addressing '" + kind + "'");
    }
    for (const auto& [name, unused] : tensors) {
        if (name != "rows" && name != used) {
            fail("the file holds a tensor that its addressing has no use for: " + name);
        }
    }
}

template <typename T>
std::vector<T> RomFile::read_list(const Tensors& tensors, const char* name, const char* dtype) const {
    const auto found = tensors.find(name);
    if (found == tensors.end()) {
        fail(std::string("the tensor '") + name + "' is missing");
    }
    const Tensor& tensor = found->second;
    if (tensor.dtype != dtype || tensor.shape.size() != 1) {
        fail(std::string("the tensor '") + name + "' is " + tensor.dtype + " of shape " + Json(tensor.shape).dump() +
             ", not " + dtype + " of one axis");
    }
    std::vector<T> elements(static_cast<std::size_t>(tensor.shape[0]));
    const std::size_t num_bytes = elements.size() * sizeof(T);
    if (read_at(file_.descriptor(), elements.data(), num_bytes, tensor.begin, file_.path()) < num_bytes) {
        fail(std::string("the file ends inside the tensor '") + name + "'");
    }
    return elements;
}

std::size_t RomFile::locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const {
    for (std::size_t lag = 0; lag <= std::min(position, address_->history()); ++lag) {
        const std::uint32_t id = sequence[position - lag];
        if (id >= address_->num_tokens()) {
            throw Error("token id " + std::to_string(id) + " has no row: the file has rows for " +
                            std::to_string(address_->num_tokens()),
                        file_.path(), "use the tokenizer and the ROM of one model");
        }
    }
    return address_->locate(sequence, position, runs);
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
