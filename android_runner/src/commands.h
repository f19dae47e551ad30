// What the program does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "backend_qnn.h"
#include "row_reader.h"
#include "sampler.h"

namespace meki {

// What `generate` and `bench` share.
struct RunOptions {
    std::string bundle;
    std::string ort_library;
    std::optional<QnnConfig> qnn;  // run the NPU binaries, not the graphs on the CPU
    int threads;
    bool big_cores;  // only those, where a phone's cores differ
    IoMode io;
    bool drop_page_cache;
    std::uint64_t row_cache_bytes;
    bool verify_rows;  // of the ROM files, by their checksums
    std::string output;
};

struct GenerateOptions {
    RunOptions run;
    std::string prompt_file;
    std::size_t max_new_tokens;
    SamplerConfig sampler;
    std::set<std::uint32_t> stop_tokens;
    bool stream;
};

struct BenchOptions {
    RunOptions run;
    std::string trace_file;
    std::size_t prompt_tokens;
    std::size_t generate_tokens;
    std::size_t depth;
    std::size_t warmup;
};

struct RowsOptions {
    std::string rom;
    std::string ids_file;
    IoMode io;
    bool verify_rows;  // by their checksums
};

struct FetchOptions {
    RowsOptions rows;
    std::size_t batch;  // tokens fetched at once; 0: all
    std::uint64_t row_cache_bytes;
};

// Continues a prompt.
void generate(const GenerateOptions& options);

// Measures prefill (pp) and decode (tg) over a trace of ids, which stands in for what is sampled, so
// that every model does the same work. Each test starts after the trace's first `depth` ids, which are
// not timed, and feeds the next `prompt_tokens` or `generate_tokens` ones.
void bench(const BenchOptions& options);

// Writes dequantized rows to stdout, by row id: little-endian float32; or their integers as they are stored,
// where the codec is static.
void rows(const RowsOptions& options, bool raw);

// Writes to stdout what each token of a text needs: the numbers of rows, int64 [T], then the dequantized
// rows, float32 [T, rows_per_token, row_dim] with zeros for those that a token does not have. With a batch
// of T tokens that comes once a batch, the next being fetched meanwhile.
void fetch(const FetchOptions& options);

}  // namespace meki
