#include "probe_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>

namespace meki {

namespace {

using Json = nlohmann::ordered_json;

constexpr double shares[] = {0.5, 0.9, 0.99};
constexpr const char* share_names[] = {"p50", "p90", "p99"};

Json spread(const std::vector<double>& ascending) {
    Json values = {{"mean", std::accumulate(ascending.begin(), ascending.end(), 0.0) /
                                static_cast<double>(ascending.size())}};
    for (std::size_t i = 0; i < std::size(shares); ++i) {
        values[share_names[i]] = percentile(ascending, shares[i]);
    }
    values["max"] = ascending.back();
    return values;
}

std::string format(const char* pattern, double value) {
    char text[64];
    std::snprintf(text, sizeof text, pattern, value);
    return text;
}

}  // namespace

double percentile(const std::vector<double>& ascending, double share) {
    const double rank = std::ceil(share * static_cast<double>(ascending.size()));
    return ascending[std::max<std::size_t>(static_cast<std::size_t>(rank), 1) - 1];
}

std::string to_json(const ProbeConfig& config, const ProbeReport& report) {
    Json methods = Json::array();
    for (const MethodReport& method : report.methods) {
        Json throughput = Json::array();
        for (const Throughput& entry : method.throughput) {
            throughput.push_back({{"threads", entry.threads},
                                  {"tokens_per_s", entry.tokens_per_s},
                                  {"bytes_per_s", entry.tokens_per_s * entry.bytes_per_token}});
        }
        methods.push_back({{"method", method.method},
                           {"latency_us", spread(method.latencies_us)},
                           {"throughput", throughput}});
    }
    Json prefill = Json::array();
    for (const PrefillReport& entry : report.prefill) {
        prefill.push_back({{"io", entry.io}, {"batch_us", spread(entry.batches_us)}});
    }
    const Json json = {{"schema", 1},
                       {"rom", config.rom},
                       {"addressing", report.addressing},
                       {"file_bytes", report.file_bytes},
                       {"bytes_per_token", report.bytes_per_token},
                       {"num_tokens", config.num_tokens},
                       {"cadence_us", config.cadence_us},
                       {"batch", config.batch},
                       {"seed", config.seed},
                       {"methods", std::move(methods)},
                       {"prefill", std::move(prefill)}};
    return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";  // a path may hold any bytes
}

std::string to_markdown(const ProbeConfig& config, const ProbeReport& report) {
    std::string text = "`" + config.rom + "`: " + std::to_string(report.file_bytes) + " bytes, " + report.addressing +
                       ", " + format("%.0f", report.bytes_per_token) + " bytes a token; " +
                       std::to_string(config.num_tokens) + " random tokens, " + std::to_string(config.cadence_us) +
                       " µs from one to the next, page cache emptied\n\n| method |";
    std::string rule = "\n|---|";
    for (const char* name : share_names) {
        text += std::string(" ") + name + " µs |";
        rule += "---:|";
    }
    text += " max µs |";
    rule += "---:|";
    for (const Throughput& entry : report.methods.front().throughput) {
        const char* const plural = entry.threads == 1 ? "" : "s";
        text += " tokens/s, " + std::to_string(entry.threads) + " thread" + plural + " | MB/s |";
        rule += "---:|---:|";
    }
    text += rule;
    for (const MethodReport& method : report.methods) {
        text += "\n| " + method.method + " |";
        for (const double share : shares) {
            text += format(" %.0f |", percentile(method.latencies_us, share));
        }
        text += format(" %.0f |", method.latencies_us.back());
        for (const Throughput& entry : method.throughput) {
            const double bytes_per_s = entry.tokens_per_s * entry.bytes_per_token;
            text += format(" %.0f |", entry.tokens_per_s) + format(" %.1f |", bytes_per_s / 1e6);
        }
    }
    text += "\n";
    for (const PrefillReport& entry : report.prefill) {
        const double median_us = percentile(entry.batches_us, 0.5);
        text += "\nprefill of " + std::to_string(config.batch) + " tokens by " + entry.io + ": " +
                format("%.2f ms", median_us / 1e3) +
                format(", %.0f tokens/s", 1e6 * static_cast<double>(config.batch) / median_us);
    }
    return text + (report.prefill.empty() ? "" : "\n");
}

}  // namespace meki
