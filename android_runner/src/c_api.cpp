// The C API (include/meki_runner.h): exceptions end here and become codes.

#include "meki_runner.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "backends.h"
#include "clock.h"
#include "cores.h"
#include "error.h"
#include "generator.h"
#include "sampler.h"

namespace {

std::optional<meki::QnnConfig> qnn_config(const meki_options& options) {
    if (options.compute != MEKI_COMPUTE_NPU) {
        return std::nullopt;
    }
    const meki::NpuMemory memory = options.npu_memory == MEKI_NPU_MEMORY_SHARED   ? meki::NpuMemory::shared
                                   : options.npu_memory == MEKI_NPU_MEMORY_COPIED ? meki::NpuMemory::copied
                                                                                  : meki::NpuMemory::automatic;
    return meki::QnnConfig{options.qnn_library, options.qnn_provider == nullptr ? "" : options.qnn_provider, memory};
}

}  // namespace

struct meki_runner {
    meki_runner(const meki_options& options, const meki::RowIo& io, const meki::SamplerConfig& config)
        : backend(meki::make_backend(options.threads, qnn_config(options))),
          generator(options.bundle, *backend, io, true),
          sampler_config(config),
          sampler(config, generator.spec().vocab_size) {}

    std::unique_ptr<meki::Backend> backend;
    meki::Generator generator;
    meki::SamplerConfig sampler_config;
    meki::Sampler sampler;
    meki_stats_data stats{};
    bool failed = false;
};

namespace {

constexpr int max_threads = 1024;
constexpr const char* fix_argument = "see meki_runner.h";

thread_local std::string last_error;

meki_status fail(meki_status status, const std::string& message) {
    last_error = meki::one_line(message);
    return status;
}

meki_status refuse(const std::string& what, const std::string& where) {
    return fail(MEKI_ERROR_ARGUMENT, meki::Error(what, where, fix_argument).what());
}

// Runs `call`; what it throws becomes `status`, or a code of its own.
template <typename Call>
meki_status guarded(meki_status status, Call call) noexcept {
    try {
        return call();
    } catch (const meki::Error& error) {
        return fail(status, error.what());
    } catch (const std::bad_alloc&) {
        return fail(MEKI_ERROR_MEMORY, "out of memory [this process] free some memory or use a smaller model");
    } catch (const std::exception& error) {
        return fail(MEKI_ERROR_INTERNAL, error.what());
    } catch (...) {
        return fail(MEKI_ERROR_INTERNAL, "an unknown exception");
    }
}

// Loads ONNX Runtime for this process; the first library named is the only one.
void load_library(const std::string& library) {
    static std::mutex mutex;
    static std::string loaded;
    const std::lock_guard<std::mutex> lock(mutex);
    if (loaded.empty()) {
        meki::load_ort(library);
        loaded = library;
    } else if (loaded != library) {
        throw meki::Error("this process uses another ONNX Runtime already: " + loaded, library,
                          "give every runner the same ort_library");
    }
}

meki_status check(const meki_options& options) {
    if (options.bundle == nullptr || options.ort_library == nullptr) {
        return refuse("bundle or ort_library is null", "options");
    }
    if (options.threads < 1 || options.threads > max_threads) {
        return refuse("threads is " + std::to_string(options.threads), "options.threads");
    }
    if (options.io < MEKI_IO_PREAD || options.io > MEKI_IO_MMAP) {
        return refuse("io is " + std::to_string(options.io), "options.io");
    }
    if (options.io == MEKI_IO_MMAP && options.row_cache_bytes > 0) {
        return refuse("rows of a map are cached by the kernel already", "options.row_cache_bytes");
    }
    if (options.compute < MEKI_COMPUTE_CPU || options.compute > MEKI_COMPUTE_NPU) {
        return refuse("compute is " + std::to_string(options.compute), "options.compute");
    }
    if ((options.compute == MEKI_COMPUTE_NPU) != (options.qnn_library != nullptr)) {
        return refuse("MEKI_COMPUTE_NPU needs qnn_library, and nothing else takes it", "options.qnn_library");
    }
    if (options.npu_memory < MEKI_NPU_MEMORY_AUTO || options.npu_memory > MEKI_NPU_MEMORY_COPIED) {
        return refuse("npu_memory is " + std::to_string(options.npu_memory), "options.npu_memory");
    }
    if (options.npu_memory != MEKI_NPU_MEMORY_AUTO && options.compute != MEKI_COMPUTE_NPU) {
        return refuse("npu_memory needs MEKI_COMPUTE_NPU", "options.npu_memory");
    }
    if (options.big_cores != 0 && options.big_cores != 1) {
        return refuse("big_cores is " + std::to_string(options.big_cores), "options.big_cores");
    }
    if (options.verify_rows != 0 && options.verify_rows != 1) {
        return refuse("verify_rows is " + std::to_string(options.verify_rows), "options.verify_rows");
    }
    // Written so that a NaN is refused too.
    if (!(options.temperature >= 0) || !(options.top_p >= 0 && options.top_p <= 1)) {
        return refuse("temperature or top_p is out of range", "options");
    }
    return MEKI_OK;
}

meki::IoMode io_mode(int32_t io) {
    return io == MEKI_IO_DIRECT ? meki::IoMode::direct : io == MEKI_IO_MMAP ? meki::IoMode::mmap : meki::IoMode::pread;
}

void clear(meki_stats_data& stats) {
    const std::uint64_t load_us = stats.load_us;
    stats = meki_stats_data{};
    stats.struct_size = sizeof stats;
    stats.load_us = load_us;
}

// Adds the steps of one call, which took `count` tokens.
void add(meki_stats_data& stats, const std::vector<meki::Step>& steps, std::size_t count, bool prefill) {
    const std::uint64_t elapsed_us = steps.back().end_us - steps.front().start_us;
    (prefill ? stats.prefill_tokens : stats.step_tokens) += count;
    (prefill ? stats.prefill_us : stats.step_us) += elapsed_us;
    for (const meki::Step& step : steps) {
        stats.run_us += step.run_us;
        stats.io_us += step.fetched.io_us;
        stats.stall_us += step.fetched.stall_us;
        stats.deadlines_missed += step.fetched.deadlines_missed;
        stats.bytes_read += step.fetched.bytes_read;
        stats.rows_read += step.fetched.rows_read;
        stats.cache_hits += step.fetched.cache_hits;
    }
}

meki_status feed(meki_runner* runner, const std::uint32_t* ids, std::size_t count, std::uint32_t* next, bool prefill) {
    if (runner == nullptr || ids == nullptr || count == 0) {
        return refuse("the runner or the tokens are null, or there is no token",
                      prefill ? "meki_prefill" : "meki_step");
    }
    if (runner->failed) {
        return fail(MEKI_ERROR_RUN, "a step of this runner failed before [meki_runner] close it and open another");
    }
    meki::Generator& generator = runner->generator;
    const std::size_t vocab_size = generator.spec().vocab_size;
    const auto bad = std::find_if(ids, ids + count, [&](std::uint32_t id) { return id >= vocab_size; });
    if (bad != ids + count) {
        return refuse("token id " + std::to_string(*bad) + " is out of range: the vocabulary has " +
                          std::to_string(vocab_size), "ids");
    }
    if (count > generator.spec().longest().length - generator.length()) {
        return fail(MEKI_ERROR_CONTEXT_FULL,
                    meki::Error(std::to_string(generator.length() + count) + " tokens do not fit the context of " +
                                    std::to_string(generator.spec().longest().length),
                                "context_length", "reset the runner, or feed fewer tokens").what());
    }
    const meki_status status = guarded(MEKI_ERROR_RUN, [&] {
        std::vector<meki::Step> steps;
        if (prefill) {
            generator.prefill(std::vector<std::uint32_t>(ids, ids + count), steps);
        } else {
            generator.decode(*ids, steps);
        }
        const std::uint32_t chosen = runner->sampler.sample(generator.logits());
        steps.back().end_us = meki::now_us();
        add(runner->stats, steps, count, prefill);
        if (next != nullptr) {
            *next = chosen;
        }
        return MEKI_OK;
    });
    runner->failed = status != MEKI_OK;
    return status;
}

}  // namespace

const char* meki_version(void) { return MEKI_RUNNER_VERSION; }

const char* meki_last_error(void) { return last_error.c_str(); }

void meki_default_options(meki_options* options, size_t struct_size) {
    if (options != nullptr) {
        meki_options defaults{};
        defaults.struct_size = struct_size;  // a later header's is refused by meki_open
        defaults.threads = 2;
        defaults.top_p = 1;
        std::memcpy(options, &defaults, std::min(struct_size, sizeof defaults));
    }
}

meki_status meki_open(const meki_options* given, meki_runner** runner) {
    if (runner == nullptr) {
        return refuse("the place for the runner is null", "meki_open");
    }
    *runner = nullptr;
    meki_options options;
    meki_default_options(&options, sizeof options);
    if (given == nullptr || given->struct_size < sizeof given->struct_size || given->struct_size > sizeof options) {
        return refuse("the options are null, or were not made by this library's meki_default_options", "options");
    }
    std::memcpy(&options, given, given->struct_size);
    if (const meki_status status = check(options); status != MEKI_OK) {
        return status;
    }
    const std::uint64_t start_us = meki::now_us();
    const meki_status loaded = guarded(MEKI_ERROR_LIBRARY, [&] {
        load_library(options.ort_library);
        return MEKI_OK;
    });
    if (loaded != MEKI_OK) {
        return loaded;
    }
    return guarded(MEKI_ERROR_BUNDLE, [&] {
        const meki::SamplerConfig config{options.temperature, static_cast<std::size_t>(options.top_k), options.top_p,
                                         options.seed};
        const meki::RowIo io{io_mode(options.io), options.row_cache_bytes, options.verify_rows == 1};
        // Of this thread only while it starts others, which inherit them.
        const meki::OnCores cores(options.big_cores == 1 ? meki::big_cores(meki::cpu_directory) : std::vector<int>());
        auto opened = std::make_unique<meki_runner>(options, io, config);
        clear(opened->stats);
        opened->stats.load_us = meki::now_us() - start_us;
        *runner = opened.release();
        return MEKI_OK;
    });
}

meki_status meki_prefill(meki_runner* runner, const uint32_t* ids, size_t count, uint32_t* next) {
    return feed(runner, ids, count, next, true);
}

meki_status meki_step(meki_runner* runner, uint32_t id, uint32_t* next) { return feed(runner, &id, 1, next, false); }

const float* meki_logits(const meki_runner* runner) {
    const bool any = runner != nullptr && !runner->failed && runner->generator.length() > 0;
    return any ? runner->generator.logits() : nullptr;
}

size_t meki_vocab_size(const meki_runner* runner) {
    return runner == nullptr ? 0 : runner->generator.spec().vocab_size;
}

size_t meki_context_length(const meki_runner* runner) {
    return runner == nullptr ? 0 : runner->generator.spec().longest().length;
}

size_t meki_length(const meki_runner* runner) { return runner == nullptr ? 0 : runner->generator.length(); }

meki_status meki_stats(const meki_runner* runner, meki_stats_data* stats) {
    if (runner == nullptr || stats == nullptr || stats->struct_size != sizeof(meki_stats_data)) {
        return refuse("the runner or the statistics are null, or struct_size is not set", "meki_stats");
    }
    *stats = runner->stats;
    return MEKI_OK;
}

meki_status meki_reset(meki_runner* runner) {
    if (runner == nullptr) {
        return refuse("the runner is null", "meki_reset");
    }
    if (runner->failed) {
        return fail(MEKI_ERROR_RUN, "a step of this runner failed before [meki_runner] close it and open another");
    }
    return guarded(MEKI_ERROR_INTERNAL, [&] {
        runner->generator.reset();
        runner->sampler = meki::Sampler(runner->sampler_config, runner->generator.spec().vocab_size);
        clear(runner->stats);
        return MEKI_OK;
    });
}

void meki_close(meki_runner* runner) { delete runner; }
