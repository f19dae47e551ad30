// What a run measured, and the JSON that it becomes (schema 1). Times are microseconds since the start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "row_fetcher.h"

namespace meki {

// One run of a graph, with the host's work for it.
struct Step {
    std::size_t num_tokens;
    std::uint64_t start_us;  // the ids are known
    std::uint64_t end_us;    // logits (and, where the test samples, the next id) are there
    std::uint64_t run_us;    // inside the graph
    FetchStats fetched;
};

struct Test {
    std::string name;
    std::vector<Step> steps;
};

struct Report {
    std::string command;
    std::string backend;
    std::string ort_version;
    int threads;
    std::vector<int> cores;  // those that the threads are kept to; empty: all
    std::string io;
    bool page_cache_dropped;
    std::uint64_t row_cache_bytes;
    std::uint64_t load_us;
    std::size_t rom_bytes_per_token;
    std::vector<Test> tests;
    std::vector<std::uint32_t> prompt_tokens;
    std::vector<std::uint32_t> generated_tokens;
};

// The report as JSON text, with the peak resident memory of this process so far.
std::string to_json(const Report& report);

}  // namespace meki
