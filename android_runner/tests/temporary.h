// A directory for one test, removed at its end, and ROM files to put there.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "check.h"

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

inline void write_rom(const std::string& path, std::uint64_t num_rows, std::uint64_t row_stride, std::uint64_t dim) {
    std::string data(static_cast<std::size_t>(num_rows * row_stride), '\0');
    for (std::uint64_t id = 0; id < num_rows; ++id) {
        for (std::size_t i = 0; i < dim; ++i) {
            const float value = rom_element(id, i);
            std::memcpy(data.data() + id * row_stride + 4 * i, &value, 4);
        }
    }
    write_file(path, safetensors(rom_header(num_rows, row_stride, dim).dump(), data));
}
