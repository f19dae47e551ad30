// What the program does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "row_reader.h"
#include "sampler.h"

namespace meki {

// What `generate` and `bench` share.
struct RunOptions {
    std::string bundle;
    std::string ort_library;
    int threads;
    bool big_cores;  // only those, where a phone's cores differ
    IoMode io;
    bool drop_page_cache;
    std::uint64_t row_cache_bytes;
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
};

// Continues a prompt.
void generate(const GenerateOptions& options);

// Measures prefill (pp) and decode (tg) over a trace of ids, which stands in for what is sampled, so
// that every model does the same work. Each test starts after the trace's first `depth` ids, which are
// not timed, and feeds the next `prompt_tokens` or `generate_tokens` ones.
void bench(const BenchOptions& options);

// Writes dequantized rows to stdout, by row id: little-endian float32.
void rows(const RowsOptions& options);

// Writes to stdout what each token of a text needs: the numbers of rows, int64 [T], then the dequantized
// rows, float32 [T, rows_per_token, row_dim] with zeros for those that a token does not have.
void fetch(const RowsOptions& options);

}  // namespace meki
