// The command line of meki-runner.

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "clock.h"
#include "commands.h"
#include "error.h"
#include "interrupt.h"
#include "options.h"

namespace meki {

namespace {

constexpr const char* usage =
    R"(meki-runner runs a bundle that `meki-edge pack` made.

  meki-runner generate --bundle DIR --ort-library PATH --prompt-file FILE --max-new-tokens N --output FILE.json
      [--temperature 0] [--top-k 0] [--top-p 1] [--seed 0] [--stop-token ID]... [--stream]
      [--threads 2] [--io pread|direct|mmap] [--drop-page-cache]
  meki-runner bench --bundle DIR --ort-library PATH --trace-file FILE --output FILE.json
      [--prompt-tokens 512] [--generate-tokens 128] [--depth 0] [--warmup 1]
      [--threads 2] [--io pread|direct|mmap] [--drop-page-cache]
  meki-runner rows --rom FILE --ids-file FILE [--io pread|direct|mmap]
      prints the dequantized rows: raw little-endian float32

Files of ids hold decimal numbers separated by white space. --stream prints each id as it is sampled.
Exit status: 0 done, 1 error, 2 wrong usage, 128 + n ended by signal n.
)";

constexpr std::uint64_t max_tokens = 1u << 30;
constexpr std::uint64_t max_id = UINT32_MAX;
constexpr double max_temperature = 1000;
constexpr std::uint64_t max_threads = 1024;

IoMode parse_io(const Options& options) {
    const std::string name = options.text("--io", name_of(IoMode::pread));
    for (const IoMode mode : {IoMode::pread, IoMode::direct, IoMode::mmap}) {
        if (name == name_of(mode)) {
            return mode;
        }
    }
    throw UsageError("--io takes pread, direct or mmap, got '" + name + "'");
}

RunOptions parse_run(const Options& options) {
    return {options.required("--bundle"),
            options.required("--ort-library"),
            static_cast<int>(options.integer("--threads", 2, 1, max_threads)),
            parse_io(options),
            options.flag("--drop-page-cache"),
            options.required("--output")};
}

void run_generate(const std::vector<std::string>& arguments) {
    const Options options(arguments,
                          {"--bundle", "--ort-library", "--prompt-file", "--max-new-tokens", "--temperature",
                           "--top-k", "--top-p", "--seed", "--stop-token", "--threads", "--io", "--output"},
                          {"--drop-page-cache", "--stream"});
    options.required("--max-new-tokens");
    GenerateOptions parsed{parse_run(options),
                           options.required("--prompt-file"),
                           options.integer("--max-new-tokens", 0, 1, max_tokens),
                           {options.number("--temperature", 0, 0, max_temperature),
                            options.integer("--top-k", 0, 0, max_id), options.number("--top-p", 1, 0, 1),
                            options.integer("--seed", 0, 0, UINT64_MAX)},
                           {},
                           options.flag("--stream")};
    for (const std::uint64_t id : options.integers("--stop-token", max_id)) {
        parsed.stop_tokens.insert(static_cast<std::uint32_t>(id));
    }
    generate(parsed);
}

void run_bench(const std::vector<std::string>& arguments) {
    const Options options(arguments,
                          {"--bundle", "--ort-library", "--trace-file", "--prompt-tokens", "--generate-tokens",
                           "--depth", "--warmup", "--threads", "--io", "--output"},
                          {"--drop-page-cache"});
    bench({parse_run(options), options.required("--trace-file"), options.integer("--prompt-tokens", 512, 0, max_tokens),
           options.integer("--generate-tokens", 128, 0, max_tokens), options.integer("--depth", 0, 0, max_tokens),
           options.integer("--warmup", 1, 0, max_tokens)});
}

void run_rows(const std::vector<std::string>& arguments) {
    const Options options(arguments, {"--rom", "--ids-file", "--io"}, {});
    rows({options.required("--rom"), options.required("--ids-file"), parse_io(options)});
}

int run(const std::vector<std::string>& arguments) {
    const std::string command = arguments.empty() ? "" : arguments.front();
    if (command == "--help" || command == "-h") {
        std::fputs(usage, stdout);
        return 0;
    }
    if (command == "--version") {
        std::puts("meki-runner " MEKI_RUNNER_VERSION);
        return 0;
    }
    const std::vector<std::string> rest(arguments.begin() + (arguments.empty() ? 0 : 1), arguments.end());
    if (command == "generate") {
        run_generate(rest);
    } else if (command == "bench") {
        run_bench(rest);
    } else if (command == "rows") {
        run_rows(rest);
    } else {
        throw UsageError(command.empty() ? "a command is missing" : "unknown command '" + command + "'");
    }
    return 0;
}

int report(const std::string& message, int status) {
    std::string line = message;
    std::replace(line.begin(), line.end(), '\n', ' ');
    std::fprintf(stderr, "error: %s\n", line.c_str());
    return status;
}

}  // namespace

}  // namespace meki

int main(int argc, char** argv) {
    meki::now_us();  // starts the clock
    meki::watch_signals();
    try {
        return meki::run(std::vector<std::string>(argv + 1, argv + argc));
    } catch (const meki::UsageError& error) {
        return meki::report(std::string(error.what()) + " [command line] see meki-runner --help", 2);
    } catch (const meki::Interrupted& interrupted) {
        return meki::report(std::string(interrupted.signal == SIGINT ? "interrupted" : "terminated") +
                                " [signal " + std::to_string(interrupted.signal) + "] nothing was written",
                            128 + interrupted.signal);
    } catch (const std::bad_alloc&) {
        return meki::report("out of memory [this process] free some memory or use a smaller model", 1);
    } catch (const std::exception& error) {
        return meki::report(error.what(), 1);
    }
}
