// The command line of meki-runner.

#include <cstdio>
#include <optional>
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
      [--backend cpu|qnn] [--qnn-library libQnnHtp.so] [--qnn-provider libonnxruntime_providers_qnn.so]
      [--npu-memory auto|shared|copied]
      [--threads 2] [--cores big|all] [--io pread|direct|mmap] [--drop-page-cache] [--row-cache-bytes 0]
      [--verify-rows]
  meki-runner bench --bundle DIR --ort-library PATH --trace-file FILE --output FILE.json
      [--prompt-tokens 512] [--generate-tokens 128] [--depth 0] [--warmup 1]
      [--backend cpu|qnn] [--qnn-library libQnnHtp.so] [--qnn-provider libonnxruntime_providers_qnn.so]
      [--npu-memory auto|shared|copied]
      [--threads 2] [--cores big|all] [--io pread|direct|mmap] [--drop-page-cache] [--row-cache-bytes 0]
      [--verify-rows]
  meki-runner rows --rom FILE --ids-file FILE [--io pread|direct|mmap] [--raw] [--verify-rows]
      prints the dequantized rows of these row ids: little-endian float32; --raw: the integers of a static codec
  meki-runner fetch --rom FILE --ids-file FILE [--io pread|direct|mmap] [--batch 0] [--row-cache-bytes 0]
      [--verify-rows]
      prints what each token of a text needs: row counts (int64), then the rows (float32), padded with zeros;
      all tokens at once, or --batch of them after another, the next fetched while one is printed

Files of ids hold decimal numbers separated by white space. --stream prints each id as it is sampled.
--backend qnn runs the bundle's NPU binaries. --qnn-provider is the provider where it is a plug-in of ONNX Runtime;
without it the library of --ort-library must have it built in. --npu-memory says how inputs and outputs come to the
NPU: in memory that it shares with the CPU, or copied in each run; auto shares where the system has libcdsprpc.so.
--verify-rows compares every row of a ROM file that is read with its checksum (`meki-edge reparam --checksums`).
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

std::uint64_t parse_row_cache(const Options& options, IoMode io) {
    const std::uint64_t row_cache_bytes = options.integer("--row-cache-bytes", 0, 0, max_cache_bytes);
    if (io == IoMode::mmap && row_cache_bytes > 0) {
        throw UsageError("--row-cache-bytes needs --io pread or direct: the pages of a map are a cache already");
    }
    return row_cache_bytes;
}

NpuMemory parse_npu_memory(const std::string& name) {
    if (name != "auto" && name != "shared" && name != "copied") {
        throw UsageError("--npu-memory takes auto, shared or copied, got '" + name + "'");
    }
    return name == "shared" ? NpuMemory::shared : name == "copied" ? NpuMemory::copied : NpuMemory::automatic;
}

std::optional<QnnConfig> parse_qnn(const Options& options) {
    const std::string backend = options.text("--backend", "cpu");
    const std::string library = options.text("--qnn-library", "");
    const std::string provider = options.text("--qnn-provider", "");
    const NpuMemory memory = parse_npu_memory(options.text("--npu-memory", "auto"));
    if (backend == "qnn") {
        if (library.empty()) {
            throw UsageError("--backend qnn needs --qnn-library, the path of libQnnHtp.so");
        }
        return QnnConfig{library, provider, memory};
    }
    if (backend != "cpu") {
        throw UsageError("--backend takes cpu or qnn, got '" + backend + "'");
    }
    if (!library.empty() || !provider.empty() || memory != NpuMemory::automatic) {
        throw UsageError("--qnn-library, --qnn-provider and --npu-memory need --backend qnn");
    }
    return std::nullopt;
}

RunOptions parse_run(const Options& options) {
    const IoMode io = parse_io(options);
    return {options.required("--bundle"),
            options.required("--ort-library"),
            parse_qnn(options),
            static_cast<int>(options.integer("--threads", 2, 1, max_threads)),
            parse_cores(options),
            io,
            options.flag("--drop-page-cache"),
            parse_row_cache(options, io),
            options.flag("--verify-rows"),
            options.required("--output")};
}

void run_generate(const std::vector<std::string>& arguments) {
    const Options options(arguments,
                          {"--bundle", "--ort-library", "--prompt-file", "--max-new-tokens", "--temperature",
                           "--top-k", "--top-p", "--seed", "--stop-token", "--backend", "--qnn-library",
                           "--qnn-provider", "--npu-memory", "--threads", "--cores", "--io", "--row-cache-bytes",
                           "--output"},
                          {"--drop-page-cache", "--stream", "--verify-rows"});
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
                           "--depth", "--warmup", "--backend", "--qnn-library", "--qnn-provider", "--npu-memory",
                           "--threads", "--cores", "--io", "--row-cache-bytes", "--output"},
                          {"--drop-page-cache", "--verify-rows"});
    const BenchOptions parsed{parse_run(options),
                              options.required("--trace-file"),
                              options.integer("--prompt-tokens", 512, 0, max_tokens),
                              options.integer("--generate-tokens", 128, 0, max_tokens),
                              options.integer("--depth", 0, 0, max_tokens),
                              options.integer("--warmup", 1, 0, max_tokens)};
    if (parsed.prompt_tokens == 0 && parsed.generate_tokens == 0) {
        throw UsageError("there is nothing to measure: give --prompt-tokens or --generate-tokens");
    }
    bench(parsed);
}

RowsOptions parse_rows(const Options& options) {
    return {options.required("--rom"), options.required("--ids-file"), parse_io(options),
            options.flag("--verify-rows")};
}

void run_rows(const std::vector<std::string>& arguments) {
    const Options options(arguments, {"--rom", "--ids-file", "--io"}, {"--verify-rows", "--raw"});
    rows(parse_rows(options), options.flag("--raw"));
}

void run_fetch(const std::vector<std::string>& arguments) {
    const Options options(arguments, {"--rom", "--ids-file", "--io", "--batch", "--row-cache-bytes"},
                          {"--verify-rows"});
    const RowsOptions parsed = parse_rows(options);
    fetch({parsed, options.integer("--batch", 0, 0, max_tokens), parse_row_cache(options, parsed.io)});
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
    if (rest == std::vector<std::string>{"--help"} || rest == std::vector<std::string>{"-h"}) {
        std::fputs(usage, stdout);
        return;
    }
    if (command == "generate") {
        run_generate(rest);
    } else if (command == "bench") {
        run_bench(rest);
    } else if (command == "rows") {
        run_rows(rest);
    } else if (command == "fetch") {
        run_fetch(rest);
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
