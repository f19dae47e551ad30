#include "io_probe.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fcntl.h>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <thread>
#include <unistd.h>

#include "buffer.h"
#include "bus_error.h"
#include "error.h"
#include "file_map.h"
#include "interrupt.h"
#include "row_reader.h"

namespace meki {

namespace {

using Clock = std::chrono::steady_clock;
using Ids = std::vector<std::uint32_t>;

double microseconds(Clock::duration duration) { return std::chrono::duration<double, std::micro>(duration).count(); }

[[noreturn]] void fail_short(const RomFile& rom) {
    throw Error("the file ends inside a row", rom.file().path(), "copy the file again");
}

// One way to read runs of rows; used by one thread.
class Method {
public:
    virtual ~Method() = default;
    virtual void read(const RowRun& run) = 0;
};

// What the bare methods share: the bytes of a run, and the room for the longest.
class BareMethod : public Method {
public:
    explicit BareMethod(const std::string& path)
        : rom_(path), pages_(rom_.run_bytes(rom_.address().rows_per_run()) + 2 * page_bytes) {}

protected:
    RomFile rom_;
    Buffer<std::uint8_t> pages_;
};

class BarePread final : public BareMethod {
public:
    using BareMethod::BareMethod;
    void read(const RowRun& run) override {
        const File& file = rom_.file();
        const std::size_t wanted = rom_.run_bytes(run.count);
        if (read_at(file.descriptor(), pages_.data(), wanted, rom_.row_offset(run.first), file.path()) < wanted) {
            fail_short(rom_);
        }
    }
};

class BareDirect final : public BareMethod {
public:
    explicit BareDirect(const std::string& path) : BareMethod(path) {
        const int descriptor = rom_.file().descriptor();
        if (::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) | O_DIRECT) != 0) {
            throw Error("the file system does not support O_DIRECT", path, "probe another file system");
        }
    }
    void read(const RowRun& run) override {
        const File& file = rom_.file();
        const std::uint64_t begin = rom_.row_offset(run.first), end = begin + rom_.run_bytes(run.count);
        const std::uint64_t first_page = begin / page_bytes * page_bytes;
        const auto length = static_cast<std::size_t>((end - first_page + page_bytes - 1) / page_bytes * page_bytes);
        if (read_at_once(file.descriptor(), pages_.data(), length, first_page, file.path()) < end - first_page) {
            fail_short(rom_);
        }
    }
};

class BareMap final : public BareMethod {
public:
    BareMap(const std::string& path, bool ask_first) : BareMethod(path), map_(rom_.file()), ask_first_(ask_first) {
        install_bus_error_handler();
    }
    void read(const RowRun& run) override {
        const auto offset = static_cast<std::size_t>(rom_.row_offset(run.first));
        const std::size_t length = rom_.run_bytes(run.count);
        if (ask_first_) {
            map_.will_need(offset, length);
        }
        Touch touch{map_.data() + offset, length, 0};
        if (!touch_mapped([](void* context) { static_cast<Touch*>(context)->run(); }, &touch)) {
            fail_short(rom_);
        }
    }

private:
    struct Touch {
        const std::uint8_t* data;
        std::size_t length;
        volatile unsigned sum;
        void run() {
            for (std::size_t i = 0; i < length; i += page_bytes) {
                sum = sum + data[i];
            }
            sum = sum + data[length - 1];
        }
    };

    FileMap map_;
    bool ask_first_;
};

class Fetch final : public Method {
public:
    Fetch(const std::string& path, IoMode mode)
        : reader_(open_reader(RomFile(path), mode)),
          out_(reader_->rom().address().rows_per_run() * reader_->rom().row_dim()) {}
    void read(const RowRun& run) override { reader_->read(run, out_.data()); }

private:
    std::unique_ptr<RowReader> reader_;
    std::vector<float> out_;
};

struct NamedMethod {
    const char* name;
    std::function<std::unique_ptr<Method>(const std::string& path)> open;
};

const std::vector<NamedMethod>& named_methods() {
    static const std::vector<NamedMethod> methods = {
        {"pread", [](const std::string& path) { return std::make_unique<BarePread>(path); }},
        {"direct", [](const std::string& path) { return std::make_unique<BareDirect>(path); }},
        {"mmap", [](const std::string& path) { return std::make_unique<BareMap>(path, true); }},
        {"faults", [](const std::string& path) { return std::make_unique<BareMap>(path, false); }},
        {"fetch pread", [](const std::string& path) { return std::make_unique<Fetch>(path, IoMode::pread); }},
        {"fetch direct", [](const std::string& path) { return std::make_unique<Fetch>(path, IoMode::direct); }},
        {"fetch mmap", [](const std::string& path) { return std::make_unique<Fetch>(path, IoMode::mmap); }},
    };
    return methods;
}

// Reads what the tokens at `begin`, `begin + step`, … of a text need.
class Reading {
public:
    Reading(const RomFile& rom, const Ids& text, Method& method)
        : rom_(rom), text_(text), method_(method), runs_(rom.address().runs_per_token()) {}

    // Returns the bytes of the token's rows.
    std::size_t token(std::size_t position) {
        const std::size_t num_runs = rom_.locate(text_.data(), position, runs_.data());
        std::size_t num_bytes = 0;
        for (std::size_t i = 0; i < num_runs; ++i) {
            method_.read(runs_[i]);
            num_bytes += rom_.run_bytes(runs_[i].count);
        }
        return num_bytes;
    }

private:
    const RomFile& rom_;
    const Ids& text_;
    Method& method_;
    std::vector<RowRun> runs_;
};

Ids random_text(const ProbeConfig& config, std::uint64_t num_ids) {
    std::mt19937_64 random(config.seed);
    Ids text(config.num_tokens);
    for (std::uint32_t& id : text) {
        id = static_cast<std::uint32_t>(random() % num_ids);
    }
    return text;
}

std::vector<double> measure_latencies(const ProbeConfig& config, const RomFile& rom, const Ids& text, Method& method) {
    Reading reading(rom, text, method);
    std::vector<double> latencies;
    auto start = Clock::now();
    for (std::size_t position = 0; position < text.size(); ++position) {
        throw_if_interrupted();
        std::this_thread::sleep_until(start);
        const auto begin = Clock::now();
        reading.token(position);
        latencies.push_back(microseconds(Clock::now() - begin));
        start = begin + std::chrono::microseconds(config.cadence_us);
    }
    std::sort(latencies.begin(), latencies.end());
    return latencies;
}

Throughput measure_throughput(const RomFile& rom, const Ids& text, const NamedMethod& method, std::size_t num_threads) {
    std::vector<std::unique_ptr<Method>> methods;
    for (std::size_t i = 0; i < num_threads; ++i) {
        methods.push_back(method.open(rom.file().path()));
    }
    std::vector<std::size_t> num_bytes(num_threads);
    std::vector<std::exception_ptr> failures(num_threads);
    std::vector<std::thread> threads;
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < num_threads; ++i) {
        threads.emplace_back([&, i] {
            try {
                Reading reading(rom, text, *methods[i]);
                for (std::size_t position = i; position < text.size(); position += num_threads) {
                    num_bytes[i] += reading.token(position);
                }
            } catch (...) {
                failures[i] = std::current_exception();
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    const double seconds = microseconds(Clock::now() - begin) / 1e6;
    for (const std::exception_ptr& failure : failures) {
        if (failure) {
            std::rethrow_exception(failure);
        }
    }
    const std::size_t total = std::accumulate(num_bytes.begin(), num_bytes.end(), std::size_t{0});
    return {num_threads, static_cast<double>(text.size()) / seconds, static_cast<double>(total) / seconds};
}

bool supports_direct(const std::string& path) {
    try {
        const BareDirect direct(path);
        return true;
    } catch (const Error&) {
        return false;
    }
}

std::string format(const char* pattern, double value) {
    char text[64];
    std::snprintf(text, sizeof text, pattern, value);
    return text;
}

constexpr double shares[] = {0.5, 0.9, 0.99};
constexpr const char* share_names[] = {"p50", "p90", "p99"};

}  // namespace

ProbeReport probe(const ProbeConfig& config) {
    const std::unique_ptr<RowReader> reader = open_reader(RomFile(config.rom), IoMode::pread);
    const RomFile& rom = reader->rom();
    const Ids text = random_text(config, rom.address().num_tokens());
    ProbeReport report{rom.address().kind(), rom.file().size(), 0, {}};
    const bool direct = supports_direct(config.rom);
    for (const NamedMethod& method : named_methods()) {
        if (!direct && std::string(method.name).find("direct") != std::string::npos) {
            continue;
        }
        MethodReport measured{method.name, {}, {}};
        reader->drop_page_cache();
        {
            const std::unique_ptr<Method> opened = method.open(config.rom);
            measured.latencies_us = measure_latencies(config, rom, text, *opened);
        }
        for (std::size_t threads = 1; threads <= config.max_threads; threads *= 2) {
            throw_if_interrupted();
            reader->drop_page_cache();
            measured.throughput.push_back(measure_throughput(rom, text, method, threads));
        }
        const Throughput& first = measured.throughput.front();
        report.bytes_per_token = first.bytes_per_s / first.tokens_per_s;
        report.methods.push_back(std::move(measured));
    }
    return report;
}

double percentile(const std::vector<double>& ascending, double share) {
    const double rank = std::ceil(share * static_cast<double>(ascending.size()));
    return ascending[std::max<std::size_t>(static_cast<std::size_t>(rank), 1) - 1];
}

std::string to_json(const ProbeConfig& config, const ProbeReport& report) {
    using Json = nlohmann::ordered_json;
    Json methods = Json::array();
    for (const MethodReport& method : report.methods) {
        Json latency = {{"mean", std::accumulate(method.latencies_us.begin(), method.latencies_us.end(), 0.0) /
                                     static_cast<double>(method.latencies_us.size())}};
        for (std::size_t i = 0; i < std::size(shares); ++i) {
            latency[share_names[i]] = percentile(method.latencies_us, shares[i]);
        }
        latency["max"] = method.latencies_us.back();
        Json throughput = Json::array();
        for (const Throughput& entry : method.throughput) {
            throughput.push_back({{"threads", entry.threads},
                                  {"tokens_per_s", entry.tokens_per_s},
                                  {"bytes_per_s", entry.bytes_per_s}});
        }
        methods.push_back({{"method", method.method}, {"latency_us", latency}, {"throughput", throughput}});
    }
    const Json json = {{"schema", 1},
                       {"rom", config.rom},
                       {"addressing", report.addressing},
                       {"file_bytes", report.file_bytes},
                       {"bytes_per_token", report.bytes_per_token},
                       {"num_tokens", config.num_tokens},
                       {"cadence_us", config.cadence_us},
                       {"seed", config.seed},
                       {"methods", std::move(methods)}};
    return json.dump(1) + "\n";
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
            text += format(" %.0f |", entry.tokens_per_s) + format(" %.1f |", entry.bytes_per_s / 1e6);
        }
    }
    return text + "\n";
}

}  // namespace meki
