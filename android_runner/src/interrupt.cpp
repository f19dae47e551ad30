#include "interrupt.h"

#include <atomic>
#include <csignal>

namespace meki {

namespace {

std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may only store to a lock-free atomic");

void remember(int signal) { received.store(signal); }

}  // namespace

void watch_signals() {
    struct sigaction action {};
    action.sa_handler = remember;
    action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
    // A reader that went away and a limit on a file's size are write errors.
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);
}

void throw_if_interrupted() {
    if (const int signal = received.load(); signal != 0) {
        throw Interrupted{signal};
    }
}

}  // namespace meki
