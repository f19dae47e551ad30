// The command line of meki-runner.

#include <cstdio>
#include <string>
#include <vector>

#include "commands.h"
#include "huge_pages.h"
#include "options.h"
#include "program.h"

namespace meki {

namespace {

constexpr const char* usage =
    R"(meki-runner runs a bundle that `meki-edge pack` made.

  meki-runner generate --bundle DIR --ort-library PATH --prompt-file FILE --max-new-tokens N --output FILE.json
      [--temperature 0] [--top-k 0] [--top-p 1] [--seed 0] [--stop-token ID]... [--stream]
      [--threads 2] [--cores big|all] [--io pread|direct|mmap] [--drop-page-cache] [--row-cache-bytes 0]
  meki-runner bench --bundle DIR --ort-library PATH --trace-file FILE --output FILE.json
      [--prompt-tokens 512] [--generate-tokens 128] [--depth 0] [--warmup 1]
      [--threads 2] [--cores big|all] [--io pread|direct|mmap] [--drop-page-cache] [--row-cache-bytes 0]
  meki-runner rows --rom FILE --ids-file FILE [--io pread|direct|mmap]
      prints the dequantized rows of these row ids: raw little-endian float32
  meki-runner fetch --rom FILE --ids-file FILE [--io pread|direct|mmap]
      prints what each token of a text needs: row counts (int64), then the rows (float32), padded with zeros

Files of ids hold decimal numbers separated by white space. --stream prints each id as it is sampled.
--cores big keeps off the slowest cores, where the kernel tells of several kinds.
Exit status: 0 done, 1 error, 2 wrong usage, 128 + n ended by signal n.
)";

constexpr std::uint64_t max_tokens = 1u << 30;
constexpr std::uint64_t max_id = UINT32_MAX;
constexpr std::uint64_t max_cache_bytes = std::uint64_t{1} << 40;
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

bool parse_cores(const Options& options) {
    const std::string name = options.text("--cores", "big");
    if (name != "big" && name != "all") {
        throw UsageError("--cores takes big or all, got '" + name + "'");
    }
    return name == "big";
}

RunOptions parse_run(const Options& options) {
    const IoMode io = parse_io(options);
    const std::uint64_t row_cache_bytes = options.integer("--row-cache-bytes", 0, 0, max_cache_bytes);
    if (io == IoMode::mmap && row_cache_bytes > 0) {
        throw UsageError("--row-cache-bytes needs --io pread or direct: the pages of a map are a cache already");
    }
    return {options.required("--bundle"),
            options.required("--ort-library"),
            static_cast<int>(options.integer("--threads", 2, 1, max_threads)),
            parse_cores(options),
            io,
            options.flag("--drop-page-cache"),
            row_cache_bytes,
            options.required("--output")};
}

void run_generate(const std::vector<std::string>& arguments) {
    const Options options(arguments,
                          {"--bundle", "--ort-library", "--prompt-file", "--max-new-tokens", "--temperature",
                           "--top-k", "--top-p", "--seed", "--stop-token", "--threads", "--cores", "--io",
                           "--row-cache-bytes", "--output"},
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
                           "--depth", "--warmup", "--threads", "--cores", "--io", "--row-cache-bytes", "--output"},
                          {"--drop-page-cache"});
    bench({parse_run(options), options.required("--trace-file"), options.integer("--prompt-tokens", 512, 0, max_tokens),
           options.integer("--generate-tokens", 128, 0, max_tokens), options.integer("--depth", 0, 0, max_tokens),
           options.integer("--warmup", 1, 0, max_tokens)});
}

RowsOptions parse_rows(const std::vector<std::string>& arguments) {
    const Options options(arguments, {"--rom", "--ids-file", "--io"}, {});
    return {options.required("--rom"), options.required("--ids-file"), parse_io(options)};
}

void run(const std::vector<std::string>& arguments) {
    const std::string command = arguments.empty() ? "" : arguments.front();
    if (command == "--help" || command == "-h") {
        std::fputs(usage, stdout);
        return;
    }
    if (command == "--version") {
        std::puts("meki-runner " MEKI_RUNNER_VERSION);
        return;
    }
    const std::vector<std::string> rest(arguments.begin() + (arguments.empty() ? 0 : 1), arguments.end());
    if (command == "generate") {
        run_generate(rest);
    } else if (command == "bench") {
        run_bench(rest);
    } else if (command == "rows") {
        rows(parse_rows(rest));
    } else if (command == "fetch") {
        fetch(parse_rows(rest));
    } else {
        throw UsageError(command.empty() ? "a command is missing" : "unknown command '" + command + "'");
    }
}

}  // namespace

}  // namespace meki

int main(int argc, char** argv) {
    meki::restart_with_huge_pages(argv);
    return meki::run_program("meki-runner", argc, argv, meki::run);
}
