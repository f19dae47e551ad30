#include "io_probe.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "interrupt.h"
#include "probe_methods.h"
#include "row_fetcher.h"
#include "row_reader.h"
#include "row_tensor.h"
#include "thread.h"

namespace meki {

namespace {

using Clock = std::chrono::steady_clock;
using Ids = std::vector<std::uint32_t>;

double microseconds(Clock::duration duration) { return std::chrono::duration<double, std::micro>(duration).count(); }

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

constexpr std::size_t num_prefills = 11;

Ids random_text(std::uint64_t seed, std::size_t num_tokens, std::uint64_t num_ids) {
    std::mt19937_64 random(seed);
    Ids text(num_tokens);
    for (std::uint32_t& id : text) {
        id = static_cast<std::uint32_t>(random() % num_ids);
    }
    return text;
}

// One token after another, the methods in turn, the first of them another one each round. Each reads rows of
// its own: those that another has just read may be in a cache below the file system.
void measure_latencies(const ProbeConfig& config, RowReader& reader, const std::vector<const NamedMethod*>& named,
                       std::vector<MethodReport>& reports) {
    const std::size_t rounds = config.num_tokens;
    const Ids text = random_text(config.seed + 2, rounds * named.size(), reader.rom().address().num_tokens());
    std::vector<std::unique_ptr<Method>> methods;
    std::vector<Reading> readings;
    for (const NamedMethod* method : named) {
        methods.push_back(method->open(config.rom));
        readings.emplace_back(reader.rom(), text, *methods.back());
    }
    reader.drop_page_cache();
    auto start = Clock::now();
    for (std::size_t round = 0; round < rounds; ++round) {
        for (std::size_t turn = 0; turn < methods.size(); ++turn) {
            const std::size_t i = (round + turn) % methods.size();
            throw_if_interrupted();
            std::this_thread::sleep_until(start);
            const auto begin = Clock::now();
            readings[i].token(round * methods.size() + turn);
            reports[i].latencies_us.push_back(microseconds(Clock::now() - begin));
            methods[i]->release();
            reader.drop_page_cache();
            start = begin + std::chrono::microseconds(config.cadence_us);
        }
    }
    for (MethodReport& report : reports) {
        std::sort(report.latencies_us.begin(), report.latencies_us.end());
    }
}

// Prompts of `batch` tokens, each fetched by every way of reading in turn.
std::vector<PrefillReport> measure_prefills(const ProbeConfig& config, bool direct) {
    struct Arm {
        PrefillReport report;
        RowFetcher fetcher;
    };
    const RomFile rom(config.rom);
    const Ids text = random_text(config.seed + 1, config.batch * num_prefills, rom.address().num_tokens());
    RowTensor out({config.batch, rom.address().rows_per_token(), rom.row_dim()}, 0, host_allocator());
    std::vector<std::unique_ptr<Arm>> arms;  // last: their threads end before what they fill
    for (const IoMode mode : {IoMode::pread, IoMode::direct, IoMode::mmap}) {
        if (mode != IoMode::direct || direct) {
            arms.emplace_back(new Arm{{name_of(mode), {}}, {open_reader(RomFile(config.rom), mode), config.batch}});
        }
    }
    for (std::size_t prefill = 0; prefill < num_prefills; ++prefill) {
        for (std::size_t turn = 0; turn < arms.size(); ++turn) {
            throw_if_interrupted();
            Arm& arm = *arms[(prefill + turn) % arms.size()];
            for (const auto& each : arms) {
                each->fetcher.reader().drop_page_cache();
            }
            const auto begin = Clock::now();
            arm.fetcher.submit(text.data(), prefill * config.batch, config.batch, out);
            arm.fetcher.wait();
            arm.report.batches_us.push_back(microseconds(Clock::now() - begin));
        }
    }
    std::vector<PrefillReport> reports;
    for (const auto& arm : arms) {
        std::sort(arm->report.batches_us.begin(), arm->report.batches_us.end());
        reports.push_back(std::move(arm->report));
    }
    return reports;
}

// Threads that have ended when this ends, even if the last one could not start.
class Threads {
public:
    ~Threads() { join(); }

    template <typename Function>
    void start(Function function) {
        threads_.push_back(start_thread(std::move(function)));
    }

    void join() {
        for (std::thread& thread : threads_) {
            thread.join();
        }
        threads_.clear();
    }

private:
    std::vector<std::thread> threads_;
};

Throughput measure_throughput(const RomFile& rom, const Ids& text, const NamedMethod& method, std::size_t num_threads) {
    std::vector<std::unique_ptr<Method>> methods;
    for (std::size_t i = 0; i < num_threads; ++i) {
        methods.push_back(method.open(rom.file().path()));
    }
    std::vector<std::size_t> num_bytes(num_threads);
    std::vector<std::exception_ptr> failures(num_threads);
    Threads threads;
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < num_threads; ++i) {
        threads.start([&, i] {
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
    threads.join();
    const double seconds = microseconds(Clock::now() - begin) / 1e6;
    for (const std::exception_ptr& failure : failures) {
        if (failure) {
            std::rethrow_exception(failure);
        }
    }
    const std::size_t total = std::accumulate(num_bytes.begin(), num_bytes.end(), std::size_t{0});
    const auto num_tokens = static_cast<double>(text.size());
    return {num_threads, num_tokens / seconds, static_cast<double>(total) / num_tokens};
}

}  // namespace

ProbeReport probe(const ProbeConfig& config) {
    const std::unique_ptr<RowReader> reader = open_reader(RomFile(config.rom), IoMode::pread);
    const RomFile& rom = reader->rom();
    const Ids text = random_text(config.seed, config.num_tokens, rom.address().num_tokens());
    ProbeReport report{rom.address().kind(), rom.file().size(), 0, {}, {}};
    const bool direct = supports_direct(config.rom);
    std::vector<const NamedMethod*> methods;
    for (const NamedMethod& method : named_methods()) {
        if (direct || std::string(method.name).find("direct") == std::string::npos) {
            methods.push_back(&method);
            report.methods.push_back({method.name, {}, {}});
        }
    }
    measure_latencies(config, *reader, methods, report.methods);
    for (std::size_t i = 0; i < methods.size(); ++i) {
        for (std::size_t threads = 1; threads <= config.max_threads; threads *= 2) {
            throw_if_interrupted();
            reader->drop_page_cache();
            report.methods[i].throughput.push_back(measure_throughput(rom, text, *methods[i], threads));
        }
    }
    // Counted, not timed: every way of reading reads the same rows.
    report.bytes_per_token = report.methods.front().throughput.front().bytes_per_token;
    if (config.batch > 0) {
        report.prefill = measure_prefills(config, direct);
    }
    return report;
}

}  // namespace meki
