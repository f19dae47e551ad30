// Headers that lie, are cut or are damaged: each its named error.

#include "rom_file.h"

#include <functional>
#include <sys/stat.h>
#include <unistd.h>

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
    CHECK(rom.address().kind() == std::string("identity") && rom.address().num_tokens() == num_rows);
    CHECK(rom.run_bytes(1) == 4 * dim);
    const std::uint32_t ids[] = {2, 3};
    meki::RowRun run{};
    CHECK(rom.locate(ids, 0, &run) == 1 && run.first == 2 && run.count == 1);
    CHECK_ERROR(rom.locate(ids, 1, &run), "token id 3 has no row: the file has rows for 3");
}

void bad_metadata() {
    rejects([](json& header) { header.erase("__metadata__"); }, "not a ROM file");
    rejects([](json& header) { header["__metadata__"] = 3; }, "expected a JSON object, got 3");
    rejects_metadata("format", "gguf", "not a ROM file: format is 'gguf'");
    rejects_metadata("format", 1, "'format' must be a string");
    rejects_metadata("version", "2", "ROM version '2', this reader knows 1");
    rejects_metadata("note", 1, "'note' must be a string");
    rejects_metadata("addressing_parameters", "{", "not valid JSON");
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
    rejects([](json& h) { h["other"] = {{"dtype", "I32"}, {"shape", {0}}, {"data_offsets", {96, 96}}}; },
            "the file holds tensors that nothing in its header uses: other");
    rejects([](json& h) { h.erase("rows"); }, "the tensors end at byte");
    rejects([](json& h) { h["rows"]["shape"] = {96}; }, "not [num_rows, row_stride]");
    rejects([](json& h) { h["rows"]["shape"] = {3.0, 32.0}; }, "has shape [3.0,32.0], not sizes");
    rejects([](json& h) { h["rows"]["shape"] = {-3, -32}; }, "has shape [-3,-32], not sizes");
    rejects([](json& h) { h["rows"]["shape"] = {0, 32}; }, "does not fit its byte range");
    rejects([](json& h) { h["rows"]["shape"] = {3, 0}; }, "does not fit its byte range");
    rejects([](json& h) { h["rows"]["shape"] = {1, UINT64_MAX}; }, "does not fit its byte range");
    rejects([](json& h) { h["rows"]["shape"] = {4, 32}; }, "does not fit its byte range");
    rejects([](json& h) { h["rows"]["shape"] = {UINT64_MAX / 16, 32}; }, "does not fit its byte range");
    rejects([](json& h) { h["rows"]["data_offsets"] = {96, 0}; }, "does not fit its byte range");
    rejects([](json& h) { h["rows"]["data_offsets"] = {96}; }, "does not fit its byte range");
    rejects([](json& h) { h["rows"]["data_offsets"] = {32, 128}; }, "'rows' ends at byte 128 of the data");
    rejects([](json& h) { h["rows"] = {{"dtype", "U8"}, {"shape", {2, 32}}, {"data_offsets", {0, 64}}}; },
            "the tensors end at byte 4160 but the file has 4192");
    rejects([](json& h) { h["rows"] = {{"dtype", "U8"}, {"shape", {2, 32}}, {"data_offsets", {32, 96}}}; },
            "the rows start at byte 4128, which is not a multiple of 4096");
    rejects([](json& h) { h["rows"]["dtype"] = "F16"; }, "is F16, which no ROM file has");
    rejects([](json& h) { h["rows"] = {{"dtype", "I32"}, {"shape", {3, 8}}, {"data_offsets", {0, 96}}}; },
            "the tensor 'rows' is I32, not U8");
}

// Token 0 has two rows, token 1 one.
const std::vector<std::int64_t> offsets = {0, 2, 3};

void rejects_ragged(const std::function<void(json&)>& edit, const std::vector<std::int64_t>& contents,
                    const char* what) {
    json header = ragged_header(offsets, stride, dim);
    edit(header);
    const std::string path =
        path_of(safetensors(header.dump(), std::string(num_rows * stride, '\0') + bytes_of(contents)));
    CHECK_ERROR(meki::RomFile{path}, what);
}

void ragged() {
    const std::string path = directory / "ragged.safetensors";
    write_ragged_rom(path, offsets, 4 * dim, dim);
    const meki::RomFile rom(path);
    CHECK(rom.address().kind() == std::string("ragged") && rom.address().num_tokens() == 2);
    CHECK(rom.address().rows_per_token() == 2 && rom.address().rows_per_run() == 2);
    CHECK(rom.run_bytes(2) == 2 * 4 * dim);
    const auto nothing = [](json&) {};
    const char* const undivided = "'offsets' does not divide the 3 rows among the tokens";
    rejects_ragged(nothing, {0, 2, 4}, undivided);
    rejects_ragged(nothing, {0, 0, 3}, undivided);
    rejects_ragged(nothing, {0, -1, 3}, undivided);
    rejects_ragged(nothing, {0, 4, 3}, undivided);
    rejects_ragged(nothing, {1, 2, 3}, undivided);
    rejects_ragged(nothing, {0, INT64_MAX, 3}, undivided);
    rejects_ragged(nothing, {0, INT64_MIN, 3}, undivided);
    rejects_ragged(nothing, {0, 1, 3, 3}, "the tensors end at byte");
    rejects_ragged(nothing, {0, 2}, "'offsets' ends at byte 120 of the data");
    const auto resized = [](std::size_t length) {
        return [=](json& h) {
            h["offsets"]["shape"] = {length};
            h["offsets"]["data_offsets"][1] = 96 + 8 * length;
        };
    };
    rejects_ragged(resized(0), {}, undivided);
    rejects_ragged(resized(1), {0}, undivided);
    rejects_ragged(resized(4), {0, 1, 3, 3}, undivided);
    const auto parameters = [](const char* text) {
        return [=](json& h) { h["__metadata__"]["addressing_parameters"] = text; };
    };
    rejects_ragged(parameters("{\"rows_per_token\":3}"), offsets, "rows_per_token is 3, the offsets say 2");
    rejects_ragged(parameters("{\"rows_per_token\":2.0}"), offsets, "'rows_per_token' must be an integer");
    rejects_ragged(parameters("{}"), offsets, "the key 'rows_per_token' is missing");
    rejects_ragged(parameters("[2]"), offsets, "expected a JSON object");
    rejects_ragged([](json& h) { h["__metadata__"].erase("addressing_parameters"); }, offsets, "is missing");
    rejects_ragged([](json& h) { h["__metadata__"]["addressing"] = "identity"; }, offsets,
                   "nothing in its header uses: offsets");
    rejects_ragged([](json& h) { h["__metadata__"]["addressing"] = "ngram_hash"; }, offsets,
                   "the tensor 'token_map' is missing");
    rejects_ragged([](json& h) { h["offsets"]["dtype"] = "I32", h["offsets"]["shape"] = {6}; }, offsets,
                   "the tensor 'offsets' is I32 of shape [6], not I64 of one axis");
    rejects_ragged([](json& h) { h["offsets"]["shape"] = {1, 3}; }, offsets, "of shape [1,3], not I64 of one axis");
    rejects_ragged([](json& h) { h["offsets"]["shape"] = {UINT64_MAX / 4}; }, offsets, "does not fit its byte range");
    rejects_ragged(
        [](json& h) {
            h["offsets"]["data_offsets"] = {0, 24};
            h["spare"] = {{"dtype", "I64"}, {"shape", {3}}, {"data_offsets", {96, 120}}};
        },
        offsets, "the tensors overlap or are out of order: 'offsets' begins before 'rows' ends");
}

void rejects_hashed(const std::function<void(json&)>& edit, const char* what,
                    const std::vector<std::int32_t>& token_map = {0, 1, 2, 1}) {
    json parameters = hash_parameters;
    edit(parameters);
    json header = hashed_header(token_map.size(), stride, dim);
    header["__metadata__"]["addressing_parameters"] = parameters.dump();
    const std::string path = path_of(safetensors(header.dump(), std::string(15 * stride, '\0') + bytes_of(token_map)));
    CHECK_ERROR(meki::RomFile{path}, what);
}

void hashed() {
    const std::string path = directory / "hashed.safetensors";
    write_hashed_rom(path, {0, 1, 2, 1}, stride, dim);
    const meki::RomFile rom(path);
    CHECK(rom.address().kind() == std::string("ngram_hash") && rom.address().num_tokens() == 4);
    CHECK(rom.address().rows_per_token() == 3 && rom.address().rows_per_run() == 1 && rom.address().history() == 2);
    const std::uint32_t ids[] = {0, 9, 1, 2};
    meki::RowRun runs[3];
    rom.locate(ids, 0, runs);
    CHECK_ERROR(rom.locate(ids, 3, runs), "token id 9 has no row");  // it is history

    const auto nothing = [](json&) {};
    const char* const heads = "the hash needs one multiplier more than orders, and a head in every order";
    rejects_hashed([](json& p) { p["multipliers"] = {3, 5}; }, heads);
    rejects_hashed([](json& p) { p["multipliers"] = {3}, p["primes"] = json::array(); }, heads);
    rejects_hashed([](json& p) { p["primes"] = {{3, 5, 7}, json::array()}; }, heads);
    rejects_hashed([](json& p) { p["primes"] = {{3, 5}, {8}}; }, "addresses more rows than the 15 of the file");
    rejects_hashed([](json& p) { p["primes"] = {{3, 5}, {INT64_MAX}}; }, "more rows than the 15");
    rejects_hashed([](json& p) { p["primes"] = {{3, 5}, {5}}; }, "the hash addresses 13 rows, the file has 15");
    rejects_hashed([](json& p) { p["primes"] = {{3, 5}, {1}}; }, "a hash head has fewer than 2 rows");
    rejects_hashed([](json& p) { p["primes"] = {{3, 5}, {-7}}; }, "has the element -7, which is not an integer");
    rejects_hashed([](json& p) { p["primes"] = {3, 5}; }, "'primes' has the element 3, which is not a list");
    rejects_hashed([](json& p) { p["primes"] = 15; }, "'primes' must be a list");
    rejects_hashed([](json& p) { p["multipliers"] = {3, 5, 7.5}; }, "'multipliers' has the element 7.5");
    rejects_hashed([](json& p) { p["multipliers"] = {3, 5, UINT64_MAX}; }, "is not an integer from 0 to 2^63 - 1");
    rejects_hashed([](json& p) { p["multipliers"] = {3, 0, 7}; }, "multipliers must be positive");
    rejects_hashed([](json& p) { p["multipliers"] = {3, 5, INT64_MAX}; },
                   "a multiplier times a compressed id overflows 64 bits");
    rejects_hashed([](json& p) { p["pad_id"] = INT64_MAX; }, "overflows 64 bits");
    rejects_hashed([](json& p) { p["pad_id"] = -1; }, "'pad_id' is -1, less than 0");
    rejects_hashed([](json& p) { p.erase("pad_id"); }, "the key 'pad_id' is missing");
    rejects_hashed(nothing, "compressed ids must not be negative", {0, -1});
    rejects_hashed(nothing, "'token_map' is empty", {});
    json largest = hashed_header(1, stride, dim);
    largest["__metadata__"]["addressing_parameters"] =
        json({{"multipliers", {INT64_MAX, 1, 1}}, {"primes", {{3, 5}, {7}}}, {"pad_id", 1}}).dump();
    const std::vector<std::int32_t> one = {1};
    meki::RomFile{path_of(safetensors(largest.dump(), std::string(15 * stride, '\0') + bytes_of(one)))};
}

void bad_checksums() {
    const std::string path = directory / "checked.safetensors";
    write_hashed_rom(path, {0, 1, 2, 1}, stride, dim);
    add_checksums(path, 4 * dim);
    CHECK(meki::RomFile(path).has_checksums() && meki::RomFile(path).read_checksums().size() == 15);
    const std::string contents = meki::File(path).read_text(1 << 20);
    const auto with = [&](std::size_t place, char byte) {
        std::string changed = contents;
        changed[changed.size() - place] = byte;
        return path_of(changed);
    };
    const char* const unlike = "the tensor 'token_map': the checksum does not match";
    CHECK_ERROR(meki::RomFile(with(1, 'x')).read_checksums(), unlike);
    CHECK_ERROR(meki::RomFile(with(16 * 4 + 4, 2)).read_checksums(), unlike);  // the last compressed id
    CHECK(meki::RomFile(with(5, 'x')).read_checksums().size() == 15);          // a row's: found when it is read
    const std::string cut = path_of(contents);
    const meki::RomFile rom(cut);
    CHECK(::truncate(cut.c_str(), static_cast<off_t>(contents.size() - 7)) == 0);
    CHECK_ERROR(rom.read_checksums(), "the file ends inside a tensor");
    write_rom(path, num_rows, stride, dim);
    CHECK_ERROR(meki::RomFile(path).read_checksums(), "the file has no checksums of its rows");
}

void bad_container() {
    const std::string good = safetensors(rom_header(num_rows, stride, dim).dump(), std::string(96, '\0'));
    CHECK_ERROR(meki::RomFile{path_of("")}, "too short for a header");
    CHECK_ERROR(meki::RomFile{path_of(good.substr(0, 7))}, "too short for a header");
    CHECK_ERROR(meki::RomFile{path_of(good.substr(0, 100))}, "the header claims 4088 bytes but the file has 100");
    CHECK_ERROR(meki::RomFile{path_of(good.substr(0, 4096))}, "'rows' ends at byte 96 of the data");
    CHECK_ERROR(meki::RomFile{path_of(good + "x")}, "the tensors end at byte 4192 but the file has 4193");
    CHECK_ERROR(meki::RomFile{path_of(std::string(8, '\xff') + good)}, "the header claims 18446744073709551615");
    CHECK_ERROR(meki::RomFile{path_of(safetensors("[1, 2]", ""))}, "does not begin with '{'");
    CHECK_ERROR(meki::RomFile{path_of(safetensors("", ""))}, "does not begin with '{'");
    CHECK_ERROR(meki::RomFile{path_of(safetensors("{\"rows\": \xff}", ""))}, "not valid JSON");
    std::string text = rom_header(num_rows, stride, dim).dump();
    text.append((64 - (8 + text.size()) % 64) % 64, ' ');
    std::uint64_t length = text.size();
    std::string unaligned(8, '\0');
    std::memcpy(unaligned.data(), &length, 8);
    CHECK_ERROR(meki::RomFile{path_of(unaligned + text + std::string(96, '\0'))}, "not a multiple of 4096");
    CHECK_ERROR(meki::RomFile{directory / "absent"}, "cannot open the file: No such file or directory");
    CHECK_ERROR(meki::RomFile{directory / ""}, "not a regular file");
    CHECK(::mkfifo((directory / "pipe").c_str(), 0600) == 0);  // to open it would wait for somebody who writes
    CHECK_ERROR(meki::RomFile{directory / "pipe"}, "not a regular file");
}

}  // namespace

int main() {
    good_file();
    bad_metadata();
    bad_segments();
    bad_tensor();
    ragged();
    hashed();
    bad_checksums();
    bad_container();
}
