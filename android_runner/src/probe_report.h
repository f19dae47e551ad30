// What the probe found, as JSON and as Markdown.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace meki {

struct ProbeConfig {
    std::string rom;
    // Tokens whose rows are read, one after another, for the latencies; and by all threads together for
    // the throughput.
    std::size_t num_tokens;
    // From the start of one token's reads to the start of the next one's. At 0 they follow at once; a
    // storage that was idle for a token's time answers more slowly.
    std::uint64_t cadence_us;
    std::size_t max_threads;
    // Tokens of a prefill; 0: none is measured.
    std::size_t batch;
    std::uint64_t seed;
};

struct Throughput {
    std::size_t threads;
    double tokens_per_s;
    double bytes_per_token;  // of the rows that were read, on average
};

struct MethodReport {
    std::string method;
    std::vector<double> latencies_us;  // of each token, ascending
    std::vector<Throughput> throughput;
};

// The rows of a whole prompt, as the harness fetches them: sorted, each once, by its reader thread.
struct PrefillReport {
    std::string io;
    std::vector<double> batches_us;  // ascending
};

struct ProbeReport {
    std::string addressing;
    std::uint64_t file_bytes;
    double bytes_per_token;
    std::vector<MethodReport> methods;
    std::vector<PrefillReport> prefill;
};

// The value below which `share` of `ascending` lies.
double percentile(const std::vector<double>& ascending, double share);

std::string to_json(const ProbeConfig& config, const ProbeReport& report);
std::string to_markdown(const ProbeConfig& config, const ProbeReport& report);

}  // namespace meki
