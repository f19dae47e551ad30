#include "program.h"

#include <csignal>
#include <cstdio>
#include <exception>
#include <fcntl.h>
#include <new>
#include <unistd.h>

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

// A file that is opened must not get the number of a standard stream that the caller closed: what is printed would go
// into it. What takes the number can be read only, so that printing is the error that it was.
void hold_standard_streams() {
    while (true) {
        const int descriptor = ::open("/dev/null", O_RDONLY);
        if (descriptor < 0) {
            return;
        }
        if (descriptor > STDERR_FILENO) {
            ::close(descriptor);
            return;
        }
    }
}

}  // namespace

int run_program(const char* name, int argc, char** argv, void (*run)(const std::vector<std::string>& arguments)) {
    now_us();  // starts the clock
    hold_standard_streams();
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
