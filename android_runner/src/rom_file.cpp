#include "rom_file.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "checksum.h"
#include "error.h"
#include "rom_address.h"
#include "strict_json.h"

namespace meki {

namespace {

constexpr std::uint64_t max_row_stride = std::uint64_t{1} << 30;
constexpr double least_scale = 0x1p-126, largest_scale = 0x1p100;  // every product is normal or zero, and finite

bool comes_after(std::int64_t layer, std::int64_t memory, const Segment& other) {
    return layer != other.layer ? layer > other.layer : memory > other.memory;
}

}  // namespace

RomFile::RomFile(const std::string& path) : container_(path) {
    check_metadata();
    check_tensors();
    parse_rows();
    parse_segments();
    parse_quantization();
    parse_address();
    check_checksums();
    tokenizer_sha256_ = container_.text("tokenizer_sha256");
}

void RomFile::check_metadata() const {
    if (container_.text("format") != "meki-edge-rom") {
        container_.fail("not a ROM file: format is " +
                        (container_.has("format") ? "'" + container_.text("format") + "'" : "absent") +
                        ", not 'meki-edge-rom'");
    }
    for (const char* key : {"version", "addressing", "segments", "tokenizer_sha256", "source_sha256"}) {
        if (!container_.has(key)) {
            container_.fail(std::string("the header lacks '") + key + "'");
        }
    }
    if (container_.text("version") != "1") {
        container_.fail("ROM version '" + container_.text("version") + "', this reader knows 1");
    }
}

// There are those that the header uses and no others, one after another.
void RomFile::check_tensors() const {
    std::vector<std::string> names = {"rows"};
    if (address_tensor() != nullptr) {
        names.emplace_back(address_tensor());
    }
    if (has_checksums()) {
        names.emplace_back("checksums");
    }
    std::uint64_t end = 0;
    for (std::size_t i = 0; i < names.size(); ++i) {
        const Safetensors::Tensor& tensor = container_.tensor(names[i]);
        if (tensor.begin < end) {
            container_.fail("the tensors overlap or are out of order: '" + names[i] + "' begins before '" +
                            names[i - 1] + "' ends");
        }
        end = tensor.end;
    }
    for (const auto& [name, unused] : container_.tensors()) {
        if (std::find(names.begin(), names.end(), name) == names.end()) {
            container_.fail("the file holds tensors that nothing in its header uses: " + name);
        }
    }
}

void RomFile::parse_rows() {
    const Safetensors::Tensor& rows = container_.tensor("rows");
    if (rows.dtype != "U8") {
        container_.fail("the tensor 'rows' is " + rows.dtype + ", not U8");
    }
    if (rows.shape.size() != 2 || rows.shape[0] == 0 || rows.shape[1] == 0 || rows.shape[1] > max_row_stride) {
        container_.fail("the tensor 'rows' has shape " + Json(rows.shape).dump() +
                        ", not [num_rows, row_stride]: it needs a row, and rows of 1 to " +
                        std::to_string(max_row_stride) + " bytes");
    }
    num_rows_ = rows.shape[0];
    row_stride_ = static_cast<std::size_t>(rows.shape[1]);
    data_start_ = rows.begin;
    if (data_start_ % page_bytes != 0) {
        container_.fail("the rows start at byte " + std::to_string(data_start_) + ", which is not a multiple of " +
                        std::to_string(page_bytes));
    }
}

void RomFile::parse_segments() {
    const std::string where = file().path() + ": segments";
    const Json listed = parse_json(container_.text("segments"), where, Safetensors::fix());
    if (!listed.is_array() || listed.empty()) {
        container_.fail("'segments' is not a list with at least one segment");
    }
    for (std::size_t index = 0; index < listed.size(); ++index) {
        const JsonObject object(listed[index], where + "[" + std::to_string(index) + "]", Safetensors::fix());
        object.allow_only({"layer", "memory", "offset", "dim", "codec"});
        const std::int64_t layer = object.integer("layer");
        const std::int64_t memory = object.integer("memory");
        if (layer < -1 || memory < 0 || (!segments_.empty() && !comes_after(layer, memory, segments_.back()))) {
            container_.fail("segment " + std::to_string(index) + " (layer " + std::to_string(layer) + ", memory " +
                            std::to_string(memory) + ") is out of order");
        }
        const Codec* codec = find_codec(object.text("codec"));
        if (codec == nullptr) {
            object.fail("unknown codec '" + object.text("codec") + "' (known: " + codec_names() + ")");
        }
        const std::int64_t offset = object.integer("offset");
        const std::int64_t dim = object.integer("dim");
        const auto stride = static_cast<std::int64_t>(row_stride_);
        // No codec packs more than two elements into a byte: bounds dim before it is multiplied.
        const bool sane = dim >= 1 && dim <= 2 * stride && offset >= static_cast<std::int64_t>(row_bytes_) &&
                          offset <= stride;
        if (!sane || codec->num_bytes(static_cast<std::size_t>(dim)) > static_cast<std::size_t>(stride - offset)) {
            container_.fail("segment " + std::to_string(index) +
                            " overlaps its neighbour or does not fit the row of " + std::to_string(row_stride_) +
                            " bytes");
        }
        const Segment segment{layer, memory, static_cast<std::size_t>(offset),
                              static_cast<std::size_t>(dim), codec};
        check_static(segment);
        row_bytes_ = segment.offset + codec->num_bytes(segment.dim);
        row_dim_ += segment.dim;
        segments_.push_back(segment);
    }
}

// All segments of a static codec are one array, which begins with the row.
void RomFile::check_static(const Segment& segment) const {
    const std::string index = std::to_string(segments_.size());
    const Codec* first = segments_.empty() ? segment.codec : segments_.front().codec;
    if (first->is_static != segment.codec->is_static) {
        const Codec* named = first->is_static ? first : segment.codec;
        container_.fail("some segments are " + std::string(named->name) + " and some are not");
    }
    if (first->is_static && (segment.offset > row_bytes_ || segment.codec != first)) {
        container_.fail("segment " + index + " is " + segment.codec->name +
                        " and does not continue an array of it at byte " + std::to_string(row_bytes_));
    }
}

void RomFile::parse_quantization() {
    if (is_static() != container_.has("quantization")) {
        container_.fail(std::string(segments_.front().codec->name) + " rows " + (is_static() ? "need a" : "have no") +
                        " 'quantization'");
    }
    if (!is_static()) {
        return;
    }
    const std::string where = file().path() + ": quantization";
    const Json parsed = parse_json(container_.text("quantization"), where, Safetensors::fix());
    const JsonObject object(parsed, where, Safetensors::fix());
    object.allow_only({"scale", "zero_point"});
    const double scale = object.number("scale");
    if (!(scale >= least_scale && scale <= largest_scale)) {
        container_.fail("the quantization's scale is " + object.at("scale").dump() +
                        ", not a number from 2^-126 to 2^100");
    }
    const std::int64_t zero_point = object.integer("zero_point");
    const std::int64_t largest = (1 << segments_.front().codec->element_bits) - 1;
    if (zero_point < 0 || zero_point > largest) {
        container_.fail("the quantization's zero_point is " + std::to_string(zero_point) + ", not in 0 to " +
                        std::to_string(largest));
    }
    quantization_ = {static_cast<float>(scale), static_cast<std::int32_t>(zero_point)};
}

const char* RomFile::address_tensor() const {
    const std::string kind = container_.text("addressing");
    return kind == RaggedAddress::name ? "offsets" : kind == NgramHashAddress::name ? "token_map" : nullptr;
}

void RomFile::parse_address() {
    const std::string kind = container_.text("addressing");
    const std::string where = file().path() + ": addressing_parameters";
    const std::string text = container_.has("addressing_parameters") ? container_.text("addressing_parameters") : "{}";
    const Json parsed = parse_json(text, where, Safetensors::fix());
    const JsonObject parameters(parsed, where, Safetensors::fix());
    if (kind == IdentityAddress::name) {
        address_ = std::make_unique<IdentityAddress>(num_rows_);
    } else if (kind == RaggedAddress::name) {
        auto offsets = container_.read<std::int64_t>(container_.list("offsets", "I64"));
        address_ = make_ragged(parameters, std::move(offsets), num_rows_);
    } else if (kind == NgramHashAddress::name) {
        auto token_map = container_.read<std::int32_t>(container_.list("token_map", "I32"));
        address_ = make_ngram_hash(parameters, std::move(token_map), num_rows_);
    } else {
        container_.fail("unknown addressing '" + kind + "'");
    }
}

void RomFile::check_checksums() const {
    if (!has_checksums()) {
        return;
    }
    const Json known = {{"algorithm", "crc32"}, {"block_rows", 1}};
    const std::string text = container_.text("checksums");
    if (parse_json(text, file().path() + ": checksums", Safetensors::fix()).dump() != known.dump()) {
        container_.fail("'checksums' are " + text + ", this reader knows " + known.dump());
    }
    const std::uint64_t expected = num_rows_ + (address_tensor() != nullptr ? 1 : 0);
    if (container_.list("checksums", "U32").shape[0] != expected) {
        container_.fail("the tensor 'checksums' does not have one for each row and tensor");
    }
}

std::vector<std::uint32_t> RomFile::read_checksums() const {
    if (!has_checksums()) {
        throw Error("the file has no checksums of its rows", file().path(),
                    "make it with `meki-edge reparam --checksums`, or read it without checking");
    }
    std::vector<std::uint32_t> checksums = container_.read<std::uint32_t>(container_.tensor("checksums"));
    if (const char* name = address_tensor()) {
        const auto bytes = container_.read<std::uint8_t>(container_.tensor(name));
        if (crc32(bytes.data(), bytes.size()) != checksums.back()) {
            container_.fail(std::string("the tensor '") + name + "': the checksum does not match");
        }
        checksums.pop_back();
    }
    return checksums;
}

std::size_t RomFile::locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const {
    for (std::size_t lag = 0; lag <= std::min(position, address_->history()); ++lag) {
        const std::uint32_t id = sequence[position - lag];
        if (id >= address_->num_tokens()) {
            throw Error("token id " + std::to_string(id) + " has no row: the file has rows for " +
                            std::to_string(address_->num_tokens()),
                        file().path(), "use the tokenizer and the ROM of one model");
        }
    }
    return address_->locate(sequence, position, runs);
}

std::size_t RomFile::delivered_bytes(RowElement element) const {
    switch (element) {
        case RowElement::float32:
            return row_dim_ * sizeof(float);
        case RowElement::float16:
            return row_dim_ * sizeof(std::uint16_t);
        case RowElement::raw:
            break;
    }
    return row_bytes_;
}

const Segment* RomFile::deliver(const std::uint8_t* row, RowElement element, float* floats, void* out) const noexcept {
    switch (element) {
        case RowElement::float32:
            return dequantize(row, static_cast<float*>(out));
        case RowElement::float16:
            break;
        case RowElement::raw:
            assert(is_static());
            if (row != out) {  // it may have been read there
                std::memcpy(out, row, row_bytes_);
            }
            return nullptr;
    }
    const Segment* damaged = nullptr;
    auto* halves = static_cast<std::uint16_t*>(out);
    for (const Segment& segment : segments_) {
        const std::uint8_t* source = row + segment.offset;
        const bool sound = segment.codec->is_half
                               ? copy_halves(source, segment.dim, halves)
                               : segment.codec->dequantize(source, segment.dim, quantization_, floats) &&
                                     to_half(floats, segment.dim, halves);
        if (!sound && damaged == nullptr) {
            damaged = &segment;
        }
        halves += segment.dim;
    }
    return damaged;
}

const Segment* RomFile::dequantize(const std::uint8_t* row, float* out) const noexcept {
    const Segment* damaged = nullptr;
    for (const Segment& segment : segments_) {
        if (!segment.codec->dequantize(row + segment.offset, segment.dim, quantization_, out) && damaged == nullptr) {
            damaged = &segment;
        }
        out += segment.dim;
    }
    return damaged;
}

}  // namespace meki
