#include <memory>
#include <string>
#include <unistd.h>

#include "backends.h"
#include "clock.h"
#include "commands.h"
#include "cores.h"
#include "error.h"
#include "generator.h"
#include "id_file.h"
#include "output_file.h"
#include "stats.h"

namespace meki {

namespace {

// Standard output for the ids alone: what libraries print there (QNN's do) goes to standard error from now on.
int take_stdout() {
    const int descriptor = ::dup(STDOUT_FILENO);
    ::dup2(STDERR_FILENO, STDOUT_FILENO);
    return descriptor;
}

void print_id(int descriptor, std::uint32_t id) {
    const std::string line = std::to_string(id) + "\n";
    write_all(descriptor, line.data(), line.size(), "stdout");
}

}  // namespace

void generate(const GenerateOptions& options) {
    const RunOptions& run = options.run;
    const std::vector<std::uint32_t> prompt = read_ids(options.prompt_file);
    OutputFile output(run.output);
    const int ids = options.stream ? take_stdout() : -1;
    const std::string ort_version = load_ort(run.ort_library);
    const std::vector<int> cores = run_on(run.big_cores ? big_cores(cpu_directory) : std::vector<int>());
    const std::unique_ptr<Backend> backend = make_backend(run.threads, run.qnn);
    Generator generator(run.bundle, *backend, {run.io, run.row_cache_bytes, run.verify_rows}, prompt.size() > 1);
    const std::size_t context = generator.spec().longest().length;
    if (prompt.size() > context || options.max_new_tokens - 1 > context - prompt.size()) {
        throw Error("a prompt of " + std::to_string(prompt.size()) + " tokens and " +
                        std::to_string(options.max_new_tokens) + " new ones do not fit the context of " +
                        std::to_string(context),
                    options.prompt_file, "shorten the prompt or lower --max-new-tokens");
    }
    const std::size_t vocab_size = generator.spec().vocab_size;
    if (!options.stop_tokens.empty() && *options.stop_tokens.rbegin() >= vocab_size) {
        throw Error("stop token " + std::to_string(*options.stop_tokens.rbegin()) +
                        " is out of range: the vocabulary has " + std::to_string(vocab_size),
                    "--stop-token", "give ids of the bundle's tokenizer.json");
    }
    Sampler sampler(options.sampler, vocab_size);
    Test prompt_test{"prompt", {}};
    Test generate_test{"generate", {}};
    generate_test.steps.reserve(options.max_new_tokens);
    std::vector<std::uint32_t> generated;
    generated.reserve(options.max_new_tokens);
    const std::uint64_t load_us = now_us();
    const Resident resident = resident_now();
    if (run.drop_page_cache) {
        generator.drop_page_cache();
    }

    generator.prefill(prompt, prompt_test.steps);
    Test* test = &prompt_test;  // the first new token is the prompt's
    while (true) {
        const std::uint32_t id = sampler.sample(generator.logits());
        test->steps.back().end_us = now_us();
        generated.push_back(id);
        if (options.stream) {
            print_id(ids, id);
        }
        if (generated.size() == options.max_new_tokens || options.stop_tokens.count(id) != 0) {
            break;
        }
        test = &generate_test;
        generator.decode(id, test->steps);
    }

    output.commit(to_json(Report{"generate", backend->name(), backend->tensor_memory(), ort_version, run.threads, cores,
                                 name_of(run.io), run.drop_page_cache, run.row_cache_bytes, run.verify_rows, load_us,
                                 resident, generator.rom_bytes_per_token(),
                                 {std::move(prompt_test), std::move(generate_test)}, prompt, std::move(generated)}));
}

}  // namespace meki
