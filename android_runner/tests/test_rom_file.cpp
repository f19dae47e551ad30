// Headers that lie, are cut or are damaged: each its named error.

#include "rom_file.h"

#include <functional>

#include "temporary.h"

namespace {

using nlohmann::json;

constexpr std::uint64_t num_rows = 3;
constexpr std::uint64_t stride = 32;
constexpr std::uint64_t dim = 6;

const TemporaryDirectory directory;

std::string path_of(const std::string& contents) {
    const std::string path = directory / "rom.safetensors";
    write_file(path, contents);
    return path;
}

void rejects(const std::function<void(json&)>& edit, const char* what) {
    json header = rom_header(num_rows, stride, dim);
    edit(header);
    const std::string path = path_of(safetensors(header.dump(), std::string(num_rows * stride, '\0')));
    CHECK_ERROR(meki::RomFile{path}, what);
}

void rejects_metadata(const char* key, const json& value, const char* what) {
    rejects([&](json& header) { header["__metadata__"][key] = value; }, what);
}

void rejects_segments(const std::function<void(json&)>& edit, const char* what) {
    rejects(
        [&](json& header) {
            json segments = json::parse(header["__metadata__"]["segments"].get<std::string>());
            edit(segments);
            header["__metadata__"]["segments"] = segments.dump();
        },
        what);
}

void good_file() {
    const meki::RomFile rom(path_of(safetensors(rom_header(num_rows, stride, dim).dump(), std::string(96, '\0'))));
    CHECK(rom.num_rows() == num_rows && rom.row_stride() == stride);
    CHECK(rom.row_bytes() == 4 * dim && rom.row_dim() == dim);
    CHECK(rom.row_offset(2) == 4096 + 2 * stride);
    CHECK(rom.tokenizer_sha256() == "t");
}

void bad_metadata() {
    rejects([](json& header) { header.erase("__metadata__"); }, "not a ROM file");
    rejects([](json& header) { header["__metadata__"] = 3; }, "expected a JSON object, got 3");
    rejects_metadata("format", "gguf", "not a ROM file: format is 'gguf'");
    rejects_metadata("format", 1, "'format' must be a string");
    rejects_metadata("version", "2", "ROM version '2', this reader knows 1");
    rejects_metadata("addressing", "ngram", "unknown addressing 'ngram'");
    rejects_metadata("segments", "[{", "not valid JSON");
    rejects_metadata("segments", std::string(100000, '['), "nested deeper");
    rejects_metadata("segments", "{}", "'segments' is not a list");
    rejects_metadata("segments", "[]", "'segments' is not a list");
    rejects_metadata("segments", "[3]", "expected a JSON object, got 3");
    for (const char* key : {"version", "addressing", "segments", "tokenizer_sha256", "source_sha256"}) {
        rejects([&](json& header) { header["__metadata__"].erase(key); },
                (std::string("the header lacks '") + key + "'").c_str());
    }
}

void bad_segments() {
    rejects_segments([](json& s) { s[0]["codec"] = "int5"; }, "unknown codec 'int5'");
    rejects_segments([](json& s) { s[0]["ofset"] = 0; }, "unknown key 'ofset'");
    rejects_segments([](json& s) { s[0].erase("dim"); }, "the key 'dim' is missing");
    rejects_segments([](json& s) { s[0]["dim"] = "6"; }, "'dim' must be an integer");
    rejects_segments([](json& s) { s[0]["dim"] = 6.0; }, "'dim' must be an integer");
    rejects_segments([](json& s) { s[0]["dim"] = 0; }, "segment 0 overlaps its neighbour or does not fit");
    rejects_segments([](json& s) { s[0]["dim"] = 9; }, "segment 0 overlaps its neighbour or does not fit");
    rejects_segments([](json& s) { s[0]["dim"] = INT64_MAX; }, "segment 0 overlaps its neighbour or does not fit");
    rejects_segments([](json& s) { s[0]["dim"] = UINT64_MAX; }, "'dim' must be an integer");
    rejects_segments([](json& s) { s[0]["offset"] = -1; }, "segment 0 overlaps its neighbour or does not fit");
    rejects_segments([](json& s) { s[0]["offset"] = 12; }, "segment 0 overlaps its neighbour or does not fit");
    rejects_segments([](json& s) { s[0]["offset"] = INT64_MAX; }, "segment 0 overlaps its neighbour or does not fit");
    rejects_segments([](json& s) { s[0]["layer"] = -2; }, "segment 0 (layer -2, memory 0) is out of order");
    rejects_segments([](json& s) { s.push_back(s[0]); }, "segment 1 (layer 0, memory 0) is out of order");
    const auto second = [](json& s, int offset) {
        s.push_back(s[0]);
        s[1]["layer"] = 1;
        s[1]["dim"] = 1;
        s[1]["offset"] = offset;
    };
    rejects_segments([&](json& s) { second(s, 23); }, "segment 1 overlaps its neighbour");
    rejects_segments([&](json& s) { second(s, 29); }, "segment 1 overlaps its neighbour or does not fit");
}

void bad_tensor() {
    rejects([](json& h) { h["other"] = h["rows"]; }, "the file holds other tensors than 'rows': other");
    rejects([](json& h) { h.erase("rows"); }, "the key 'rows' is missing");
    rejects([](json& h) { h["rows"]["dtype"] = "I8"; }, "the tensor 'rows' is I8, not U8");
    rejects([](json& h) { h["rows"]["shape"] = {96}; }, "not [num_rows, row_stride]");
    rejects([](json& h) { h["rows"]["shape"] = {3.0, 32.0}; }, "not [num_rows, row_stride]");
    rejects([](json& h) { h["rows"]["shape"] = {-3, -32}; }, "not [num_rows, row_stride]");
    rejects([](json& h) { h["rows"]["shape"] = {0, 32}; }, "it needs a row");
    rejects([](json& h) { h["rows"]["shape"] = {3, 0}; }, "it needs a row");
    rejects([](json& h) { h["rows"]["shape"] = {1, UINT64_MAX}; }, "it needs a row");
    rejects([](json& h) { h["rows"]["shape"] = {4, 32}; }, "does not fit its byte range");
    rejects([](json& h) { h["rows"]["shape"] = {UINT64_MAX / 16, 32}; }, "does not fit its byte range");
    rejects([](json& h) { h["rows"]["data_offsets"] = {96, 0}; }, "does not fit its byte range");
    rejects([](json& h) { h["rows"]["data_offsets"] = {32, 128}; }, "the rows end at byte 128");
    rejects([](json& h) { h["rows"] = {{"dtype", "U8"}, {"shape", {2, 32}}, {"data_offsets", {0, 64}}}; },
            "the rows end at byte 64");
    rejects([](json& h) { h["rows"]["strides"] = 1; }, "unknown key 'strides'");
}

void bad_container() {
    const std::string good = safetensors(rom_header(num_rows, stride, dim).dump(), std::string(96, '\0'));
    CHECK_ERROR(meki::RomFile{path_of("")}, "too short for a header");
    CHECK_ERROR(meki::RomFile{path_of(good.substr(0, 7))}, "too short for a header");
    CHECK_ERROR(meki::RomFile{path_of(good.substr(0, 100))}, "the header claims 4088 bytes but the file has 100");
    CHECK_ERROR(meki::RomFile{path_of(good.substr(0, 4096))}, "the rows end at byte 96");
    CHECK_ERROR(meki::RomFile{path_of(good + "x")}, "the rows end at byte 96");
    CHECK_ERROR(meki::RomFile{path_of(std::string(8, '\xff') + good)}, "the header claims 18446744073709551615");
    CHECK_ERROR(meki::RomFile{path_of(safetensors("[1, 2]", ""))}, "expected a JSON object");
    CHECK_ERROR(meki::RomFile{path_of(safetensors("{\"rows\": \xff}", ""))}, "not valid JSON");
    std::string text = rom_header(num_rows, stride, dim).dump();
    text.append((64 - (8 + text.size()) % 64) % 64, ' ');
    std::uint64_t length = text.size();
    std::string unaligned(8, '\0');
    std::memcpy(unaligned.data(), &length, 8);
    CHECK_ERROR(meki::RomFile{path_of(unaligned + text + std::string(96, '\0'))}, "not a multiple of 4096");
    CHECK_ERROR(meki::RomFile{directory / "absent"}, "cannot open the file: No such file or directory");
    CHECK_ERROR(meki::RomFile{directory / ""}, "not a regular file");
}

}  // namespace

int main() {
    good_file();
    bad_metadata();
    bad_segments();
    bad_tensor();
    bad_container();
}
