// The command line of meki-rom-probe.

#include <cstdio>
#include <unistd.h>

#include "io_probe.h"
#include "options.h"
#include "output_file.h"
#include "program.h"

namespace meki {

namespace {

constexpr const char* usage =
    R"(meki-rom-probe measures how fast the storage under a ROM file gives the rows of random tokens.

  meki-rom-probe --rom FILE [--tokens 300] [--cadence-us 0] [--threads 4] [--batch 0] [--seed 0]
      [--format md|json]

Latencies are of one token after another, --cadence-us apart (30000: as a model of 33 tokens/s asks for them),
the methods in turn; the throughput is that of 1, 2, 4 … --threads threads at once; --batch also measures the
prefill of as many tokens. The page cache of the file is emptied before each measurement, which needs no
privileges.
)";

constexpr std::uint64_t max_tokens = 10'000'000;
constexpr std::uint64_t max_batch = 1 << 20;
constexpr std::uint64_t max_cadence_us = 60'000'000;

void run(const std::vector<std::string>& arguments) {
    if (!arguments.empty() && (arguments.front() == "--help" || arguments.front() == "-h")) {
        std::fputs(usage, stdout);
        return;
    }
    if (!arguments.empty() && arguments.front() == "--version") {
        std::puts("meki-rom-probe " MEKI_RUNNER_VERSION);
        return;
    }
    const Options options(arguments, {"--rom", "--tokens", "--cadence-us", "--threads", "--batch", "--seed",
                                      "--format"},
                          {});
    const std::string format = options.text("--format", "md");
    if (format != "md" && format != "json") {
        throw UsageError("--format takes md or json, got '" + format + "'");
    }
    const ProbeConfig config{options.required("--rom"), options.integer("--tokens", 300, 1, max_tokens),
                             options.integer("--cadence-us", 0, 0, max_cadence_us),
                             options.integer("--threads", 4, 1, 256), options.integer("--batch", 0, 0, max_batch),
                             options.integer("--seed", 0, 0, UINT64_MAX)};
    const ProbeReport report = probe(config);
    const std::string text = format == "json" ? to_json(config, report) : to_markdown(config, report);
    write_all(STDOUT_FILENO, text.data(), text.size(), "stdout");
}

}  // namespace

}  // namespace meki

int main(int argc, char** argv) { return meki::run_program("meki-rom-probe", argc, argv, meki::run); }
