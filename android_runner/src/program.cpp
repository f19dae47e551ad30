#include "program.h"

#include <csignal>
#include <cstdio>
#include <exception>
#include <new>

#include "clock.h"
#include "error.h"
#include "interrupt.h"
#include "options.h"

namespace meki {

namespace {

int report(const std::string& message, int status) {
    std::fprintf(stderr, "error: %s\n", one_line(message).c_str());
    return status;
}

}  // namespace

int run_program(const char* name, int argc, char** argv, void (*run)(const std::vector<std::string>& arguments)) {
    now_us();  // starts the clock
    watch_signals();
    try {
        run(std::vector<std::string>(argv + 1, argv + argc));
        return 0;
    } catch (const UsageError& error) {
        return report(std::string(error.what()) + " [command line] see " + name + " --help", 2);
    } catch (const Interrupted& interrupted) {
        return report(std::string(interrupted.signal == SIGINT ? "interrupted" : "terminated") + " [signal " +
                          std::to_string(interrupted.signal) + "] nothing was written",
                      128 + interrupted.signal);
    } catch (const std::bad_alloc&) {
        return report("out of memory [this process] free some memory or use a smaller model", 1);
    } catch (const std::exception& error) {
        return report(error.what(), 1);
    }
}

}  // namespace meki
