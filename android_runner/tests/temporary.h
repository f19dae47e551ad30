// A directory for one test, removed at its end, and ROM files to put there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "check.h"
#include "checksum.h"

class TemporaryDirectory {
public:
    TemporaryDirectory() {
        const char* parent = std::getenv("TMPDIR");
        path_ = std::string(parent != nullptr ? parent : "/tmp") + "/meki-test-XXXXXX";
        CHECK(::mkdtemp(path_.data()) != nullptr);
    }
    ~TemporaryDirectory() {
        if (std::system(("rm -rf '" + path_ + "'").c_str()) != 0) {
            std::perror("rm");
        }
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

    std::string operator/(const std::string& name) const { return path_ + "/" + name; }

private:
    std::string path_;
};

inline void write_file(const std::string& path, const std::string& contents) {
    std::ofstream file(path, std::ios::binary);
    file << contents;
    CHECK(file.good());
}

// The header of a ROM file with one fp32 segment of `dim` elements a row.
inline nlohmann::json rom_header(std::uint64_t num_rows, std::uint64_t row_stride, std::uint64_t dim) {
    const nlohmann::json segments = {{{"layer", 0}, {"memory", 0}, {"offset", 0}, {"dim", dim}, {"codec", "fp32"}}};
    return {{"__metadata__",
             {{"format", "meki-edge-rom"},
              {"version", "1"},
              {"addressing", "identity"},
              {"segments", segments.dump()},
              {"tokenizer_sha256", "t"},
              {"source_sha256", "s"}}},
            {"rows",
             {{"dtype", "U8"}, {"shape", {num_rows, row_stride}}, {"data_offsets", {0, num_rows * row_stride}}}}};
}

// A safetensors file of this header text, padded as a ROM file is, and these data.
inline std::string safetensors(std::string header, const std::string& data) {
    header.append((4096 - (8 + header.size()) % 4096) % 4096, ' ');
    const std::uint64_t length = header.size();
    std::string prefix(sizeof length, '\0');
    std::memcpy(prefix.data(), &length, sizeof length);
    return prefix + header + data;
}

// Element `i` of row `id` in the files of `write_rom`.
inline float rom_element(std::uint64_t id, std::size_t i) {
    return static_cast<float>(id) + static_cast<float>(i) / 1024.0f;
}

// The rows of the files of `write_rom`, as bytes.
inline std::string rom_rows(std::uint64_t num_rows, std::uint64_t row_stride, std::uint64_t dim) {
    std::string data(static_cast<std::size_t>(num_rows * row_stride), '\0');
    for (std::uint64_t id = 0; id < num_rows; ++id) {
        for (std::size_t i = 0; i < dim; ++i) {
            const float value = rom_element(id, i);
            std::memcpy(data.data() + id * row_stride + 4 * i, &value, 4);
        }
    }
    return data;
}

inline void write_rom(const std::string& path, std::uint64_t num_rows, std::uint64_t row_stride, std::uint64_t dim) {
    write_file(path, safetensors(rom_header(num_rows, row_stride, dim).dump(), rom_rows(num_rows, row_stride, dim)));
}

// The bytes of a list of integers, as a tensor has them.
template <typename T>
std::string bytes_of(const std::vector<T>& list) {
    return {reinterpret_cast<const char*>(list.data()), list.size() * sizeof(T)};
}

// A ROM file of static16 rows: element `i` of row `id` is the integer 100 · id + i, of scale ½ and zero point 1000.
inline std::uint16_t rom_integer(std::uint64_t id, std::size_t i) { return static_cast<std::uint16_t>(100 * id + i); }

inline void write_static_rom(const std::string& path, std::uint64_t num_rows, std::uint64_t row_stride,
                             std::uint64_t dim) {
    nlohmann::json header = rom_header(num_rows, row_stride, dim);
    nlohmann::json segments = nlohmann::json::parse(header["__metadata__"]["segments"].get<std::string>());
    segments[0]["codec"] = "static16";
    header["__metadata__"]["segments"] = segments.dump();
    header["__metadata__"]["quantization"] = R"({"scale":0.5,"zero_point":1000})";
    std::string data(static_cast<std::size_t>(num_rows * row_stride), '\0');
    for (std::uint64_t id = 0; id < num_rows; ++id) {
        for (std::size_t i = 0; i < dim; ++i) {
            const std::uint16_t integer = rom_integer(id, i);
            std::memcpy(data.data() + id * row_stride + 2 * i, &integer, 2);
        }
    }
    write_file(path, safetensors(header.dump(), data));
}

// Adds the checksums of all rows, and of the addressing's tensor if there is one, to a ROM file.
inline void add_checksums(const std::string& path, std::size_t row_bytes) {
    std::ifstream file(path, std::ios::binary);
    std::string contents((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::uint64_t length = 0;
    std::memcpy(&length, contents.data(), sizeof length);
    nlohmann::json header = nlohmann::json::parse(contents.substr(8, length));
    const std::string data = contents.substr(8 + length);
    std::vector<std::uint32_t> checksums;
    const auto append = [&](std::size_t begin, std::size_t size) {
        checksums.push_back(meki::crc32_by_tables(reinterpret_cast<const std::uint8_t*>(data.data()) + begin, size));
    };
    const std::size_t num_rows = header["rows"]["shape"][0], stride = header["rows"]["shape"][1];
    for (std::size_t row = 0; row < num_rows; ++row) {
        append(row * stride, row_bytes);
    }
    for (const char* name : {"offsets", "token_map"}) {
        if (header.contains(name)) {
            const std::size_t begin = header[name]["data_offsets"][0], end = header[name]["data_offsets"][1];
            append(begin, end - begin);
        }
    }
    header["__metadata__"]["checksums"] = R"({"algorithm":"crc32","block_rows":1})";
    header["checksums"] = {{"dtype", "U32"},
                           {"shape", {checksums.size()}},
                           {"data_offsets", {data.size(), data.size() + 4 * checksums.size()}}};
    write_file(path, safetensors(header.dump(), data + bytes_of(checksums)));
}

// Adds to a header of identity addressing what another one needs: its parameters and its tensor, whose
// `length` elements of `element_bytes` bytes follow the rows.
inline void set_addressing(nlohmann::json& header, const char* kind, const nlohmann::json& parameters,
                           const char* tensor, const char* dtype, std::size_t length, std::size_t element_bytes) {
    header["__metadata__"]["addressing"] = kind;
    header["__metadata__"]["addressing_parameters"] = parameters.dump();
    const auto begin = header["rows"]["data_offsets"][1].get<std::uint64_t>();
    header[tensor] = {{"dtype", dtype}, {"shape", {length}}, {"data_offsets", {begin, begin + length * element_bytes}}};
}

inline nlohmann::json ragged_header(const std::vector<std::int64_t>& offsets, std::uint64_t row_stride,
                                    std::uint64_t dim) {
    std::int64_t most = 0;
    for (std::size_t i = 1; i < offsets.size(); ++i) {
        most = std::max(most, offsets[i] - offsets[i - 1]);
    }
    nlohmann::json header = rom_header(static_cast<std::uint64_t>(offsets.back()), row_stride, dim);
    set_addressing(header, "ragged", {{"rows_per_token", most}}, "offsets", "I64", offsets.size(), 8);
    return header;
}

// As `write_rom`, with the rows offsets[t] … offsets[t + 1] - 1 for token t.
inline void write_ragged_rom(const std::string& path, const std::vector<std::int64_t>& offsets,
                             std::uint64_t row_stride, std::uint64_t dim) {
    const std::string rows = rom_rows(static_cast<std::uint64_t>(offsets.back()), row_stride, dim);
    write_file(path, safetensors(ragged_header(offsets, row_stride, dim).dump(), rows + bytes_of(offsets)));
}

// Two orders, of two heads and of one: 3 + 5 + 7 rows.
inline const nlohmann::json hash_parameters = {
    {"multipliers", {3, 5, 7}}, {"primes", {{3, 5}, {7}}}, {"pad_id", 2}};

inline nlohmann::json hashed_header(std::size_t vocab_size, std::uint64_t row_stride, std::uint64_t dim) {
    nlohmann::json header = rom_header(15, row_stride, dim);
    set_addressing(header, "ngram_hash", hash_parameters, "token_map", "I32", vocab_size, 4);
    return header;
}

inline void write_hashed_rom(const std::string& path, const std::vector<std::int32_t>& token_map,
                             std::uint64_t row_stride, std::uint64_t dim) {
    const std::string rows = rom_rows(15, row_stride, dim);
    write_file(path, safetensors(hashed_header(token_map.size(), row_stride, dim).dump(), rows + bytes_of(token_map)));
}
