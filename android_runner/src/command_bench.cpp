#include <algorithm>
#include <memory>
#include <string>

#include "backends.h"
#include "clock.h"
#include "commands.h"
#include "cores.h"
#include "error.h"
#include "generator.h"
#include "id_file.h"
#include "output_file.h"
#include "sampler.h"
#include "stats.h"

namespace meki {

namespace {

using Ids = std::vector<std::uint32_t>;

class Bench {
public:
    Bench(const BenchOptions& options, const Ids& trace, Generator& generator)
        : options_(options),
          generator_(generator),
          depth_(trace.begin(), at(trace, options.depth)),
          prompt_(at(trace, options.depth), at(trace, options.depth + options.prompt_tokens)),
          generate_(at(trace, options.depth), at(trace, options.depth + options.generate_tokens)) {}

    // Both phases once, in all contexts that they come to, so that the sessions have planned their memory and the
    // threads are awake.
    void warm_up() {
        const Context& longest = generator_.spec().longest();
        std::vector<Step> untimed;
        for (std::size_t i = 0; i < options_.warmup; ++i) {
            generator_.warm_up_contexts(depth_.size() + std::max(prompt_.size(), generate_.size()));
            const std::size_t chunk = std::min(prompt_.size(), longest.prefill.num_tokens);
            generator_.prefill(Ids(prompt_.cbegin(), at(prompt_, chunk)), untimed);
            if (!generate_.empty() && generator_.length() < longest.length) {
                generator_.decode(generate_.front(), untimed);
            }
        }
    }

    Test prefill() {
        Test test{"pp" + std::to_string(prompt_.size()), {}};
        begin_test(test, prompt_.size());
        generator_.prefill(prompt_, test.steps);
        return test;
    }

    // Each step samples, as real decoding does, and then goes on with the trace's id instead.
    Test decode(Ids& sampled) {
        Test test{"tg" + std::to_string(generate_.size()), {}};
        sampled.reserve(generate_.size());
        begin_test(test, generate_.size());
        for (const std::uint32_t id : generate_) {
            generator_.decode(id, test.steps);
            sampled.push_back(argmax(generator_.logits(), generator_.spec().vocab_size));
            test.steps.back().end_us = now_us();
        }
        return test;
    }

    const Ids& prompt() const { return prompt_; }

private:
    static Ids::const_iterator at(const Ids& ids, std::size_t index) {
        return ids.begin() + static_cast<std::ptrdiff_t>(index);
    }

    void begin_test(Test& test, std::size_t num_tokens) {
        std::vector<Step> untimed;
        generator_.reset();
        generator_.prefill(depth_, untimed);
        test.steps.reserve(num_tokens);
        if (options_.run.drop_page_cache) {
            generator_.drop_page_cache();
        }
    }

    const BenchOptions& options_;
    Generator& generator_;
    Ids depth_;
    Ids prompt_;
    Ids generate_;
};

void check_lengths(const BenchOptions& options, std::size_t trace, std::size_t context) {
    const std::size_t needed = options.depth + std::max(options.prompt_tokens, options.generate_tokens);
    if (needed > trace) {
        throw Error("the trace has " + std::to_string(trace) + " ids, the benchmark needs " + std::to_string(needed),
                    options.trace_file, "give a longer trace or fewer tokens");
    }
    if (needed > context) {
        throw Error(std::to_string(needed) + " tokens do not fit the context of " + std::to_string(context),
                    options.run.bundle, "lower --depth, --prompt-tokens or --generate-tokens");
    }
}

}  // namespace

void bench(const BenchOptions& options) {
    const RunOptions& run = options.run;
    const Ids trace = read_ids(options.trace_file);
    OutputFile output(run.output);
    const std::string ort_version = load_ort(run.ort_library);
    const std::vector<int> cores = run_on(run.big_cores ? big_cores(cpu_directory) : std::vector<int>());
    const std::unique_ptr<Backend> backend = make_backend(run.threads, run.qnn);
    const bool with_prefill = options.prompt_tokens > 1 || options.depth > 1;
    Generator generator(run.bundle, *backend, {run.io, run.row_cache_bytes, run.verify_rows}, with_prefill);
    check_lengths(options, trace.size(), generator.spec().longest().length);
    const std::uint64_t load_us = now_us();

    Bench bench(options, trace, generator);
    bench.warm_up();
    const Resident resident = resident_now();
    std::vector<Test> tests;
    Ids sampled;
    if (options.prompt_tokens > 0) {
        tests.push_back(bench.prefill());
    }
    if (options.generate_tokens > 0) {
        tests.push_back(bench.decode(sampled));
    }
    output.commit(to_json(Report{"bench", backend->name(), backend->tensor_memory(), ort_version, run.threads, cores,
                                 name_of(run.io), run.drop_page_cache, run.row_cache_bytes, run.verify_rows, load_us,
                                 resident, generator.rom_bytes_per_token(), std::move(tests), bench.prompt(),
                                 std::move(sampled)}));
}

}  // namespace meki
