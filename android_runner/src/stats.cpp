#include "stats.h"

#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <utility>

namespace meki {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* status = "/proc/self/status";

// Fills in what a file of /proc says, in bytes, on each named line.
void read_lines(const char* path, std::initializer_list<std::pair<const char*, std::uint64_t*>> lines) {
    std::ifstream file(path);
    for (std::string text; std::getline(file, text);) {
        for (const auto& [name, value] : lines) {
            const std::string prefix = std::string(name) + ":";
            if (text.rfind(prefix, 0) == 0) {
                *value = std::strtoull(text.c_str() + prefix.size(), nullptr, 10) * 1024;
            }
        }
    }
}

// Not from getrusage, whose maximum starts with that of the process that started this one.
std::uint64_t peak_rss_bytes() {
    std::uint64_t peak = 0;
    read_lines(status, {{"VmHWM", &peak}});
    return peak;
}

// Resident memory with a share of the pages that other processes use too; null where the kernel does not tell.
Json pss_bytes() {
    std::uint64_t pss = 0;
    read_lines("/proc/self/smaps_rollup", {{"Pss", &pss}});
    return pss == 0 ? Json() : Json(pss);
}

Json to_json(const Resident& resident) {
    return {{"rss_bytes", resident.rss_bytes},
            {"anonymous_bytes", resident.anonymous_bytes},
            {"file_bytes", resident.file_bytes}};
}

Json or_null(const std::optional<std::uint64_t>& value) { return value ? Json(*value) : Json(); }

Json to_json(const Step& step) {
    return {{"num_tokens", step.num_tokens},
            {"start_us", step.start_us},
            {"end_us", step.end_us},
            {"run_us", step.run_us},
            {"io_us", step.fetched.io_us},
            {"stall_us", step.fetched.stall_us},
            {"slack_us", or_null(step.fetched.slack_us)},
            {"deadlines_missed", step.fetched.deadlines_missed},
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
            {"deadlines_missed", fetched.deadlines_missed},
            {"steps", std::move(steps)}};
}

}  // namespace

Resident resident_now() {
    Resident resident{};
    read_lines(status, {{"VmRSS", &resident.rss_bytes},
                        {"RssAnon", &resident.anonymous_bytes},
                        {"RssFile", &resident.file_bytes}});
    return resident;
}

std::string to_json(const Report& report) {
    const Resident resident_at_end = resident_now();
    Json tests = Json::array();
    for (const Test& test : report.tests) {
        tests.push_back(to_json(test));
    }
    const Json json = {{"schema", 3},
                       {"command", report.command},
                       {"runner_version", MEKI_RUNNER_VERSION},
                       {"backend", report.backend},
                       {"tensor_memory", report.tensor_memory},
                       {"ort_version", report.ort_version},
                       {"threads", report.threads},
                       {"cores", report.cores.empty() ? Json() : Json(report.cores)},
                       {"io", report.io},
                       {"page_cache_dropped", report.page_cache_dropped},
                       {"row_cache_bytes", report.row_cache_bytes},
                       {"verify_rows", report.verify_rows},
                       {"load_us", report.load_us},
                       {"peak_rss_bytes", peak_rss_bytes()},
                       {"pss_bytes", pss_bytes()},
                       {"resident_at_start", to_json(report.resident_at_start)},
                       {"resident_at_end", to_json(resident_at_end)},
                       {"rom_bytes_per_token", report.rom_bytes_per_token},
                       {"tests", std::move(tests)},
                       {"prompt_tokens", report.prompt_tokens},
                       {"generated_tokens", report.generated_tokens}};
    return json.dump(1) + "\n";
}

}  // namespace meki
