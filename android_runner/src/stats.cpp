#include "stats.h"

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

namespace meki {

namespace {

using Json = nlohmann::ordered_json;

// From /proc, since getrusage's maximum starts with that of the process that started this one.
std::uint64_t peak_rss_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.rfind("VmHWM:", 0) == 0) {
            return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
        }
    }
    return 0;
}

Json to_json(const Step& step) {
    return {{"num_tokens", step.num_tokens},
            {"start_us", step.start_us},
            {"end_us", step.end_us},
            {"run_us", step.run_us},
            {"io_us", step.fetched.io_us},
            {"stall_us", step.fetched.stall_us},
            {"bytes_read", step.fetched.bytes_read},
            {"rows_read", step.fetched.rows_read},
            {"cache_hits", step.fetched.cache_hits}};
}

Json to_json(const Test& test) {
    std::size_t num_tokens = 0;
    FetchStats fetched;
    Json steps = Json::array();
    for (const Step& step : test.steps) {
        num_tokens += step.num_tokens;
        fetched += step.fetched;
        steps.push_back(to_json(step));
    }
    const std::uint64_t elapsed_us = test.steps.empty() ? 0 : test.steps.back().end_us - test.steps.front().start_us;
    Json hit_rate;  // null where no rows were wanted
    if (const std::uint64_t wanted = fetched.cache_hits + fetched.rows_read; wanted > 0) {
        hit_rate = static_cast<double>(fetched.cache_hits) / static_cast<double>(wanted);
    }
    return {{"test", test.name},
            {"num_tokens", num_tokens},
            {"elapsed_us", elapsed_us},
            {"cache_hit_rate", hit_rate},
            {"steps", std::move(steps)}};
}

}  // namespace

std::string to_json(const Report& report) {
    Json tests = Json::array();
    for (const Test& test : report.tests) {
        tests.push_back(to_json(test));
    }
    const Json json = {{"schema", 1},
                       {"command", report.command},
                       {"runner_version", MEKI_RUNNER_VERSION},
                       {"backend", report.backend},
                       {"ort_version", report.ort_version},
                       {"threads", report.threads},
                       {"cores", report.cores.empty() ? Json() : Json(report.cores)},
                       {"io", report.io},
                       {"page_cache_dropped", report.page_cache_dropped},
                       {"row_cache_bytes", report.row_cache_bytes},
                       {"load_us", report.load_us},
                       {"peak_rss_bytes", peak_rss_bytes()},
                       {"rom_bytes_per_token", report.rom_bytes_per_token},
                       {"tests", std::move(tests)},
                       {"prompt_tokens", report.prompt_tokens},
                       {"generated_tokens", report.generated_tokens}};
    return json.dump(1) + "\n";
}

}  // namespace meki
