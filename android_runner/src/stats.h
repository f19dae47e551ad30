// What a run measured, and the JSON that it becomes (schema 3). Times are microseconds since the start.
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

// Memory of this process that is resident, as /proc tells it; zeros where it does not.
struct Resident {
    std::uint64_t rss_bytes;
    std::uint64_t anonymous_bytes;
    std::uint64_t file_bytes;  // pages of mapped files, which the kernel may drop
};

Resident resident_now();

struct Report {
    std::string command;
    std::string backend;
    std::string tensor_memory;  // of inputs and outputs: see Backend
    std::string ort_version;
    int threads;
    std::vector<int> cores;  // those that the threads are kept to; empty: all
    std::string io;
    bool page_cache_dropped;
    std::uint64_t row_cache_bytes;
    bool verify_rows;
    std::uint64_t load_us;
    Resident resident_at_start;  // loaded, before the first timed step
    std::size_t rom_bytes_per_token;
    std::vector<Test> tests;
    std::vector<std::uint32_t> prompt_tokens;
    std::vector<std::uint32_t> generated_tokens;
};

// The report as JSON text, with this process's resident memory: now, and the peak so far, which counts the
// pages of weights that loading mapped and let go.
std::string to_json(const Report& report);

}  // namespace meki
