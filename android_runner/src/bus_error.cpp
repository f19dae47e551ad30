#include "bus_error.h"

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <mutex>

namespace meki {

namespace {

thread_local sigjmp_buf* volatile escape = nullptr;

void on_bus_error(int signal) {
    if (escape != nullptr) {
        siglongjmp(*escape, 1);
    }
    std::signal(signal, SIG_DFL);  // not ours: the load runs again and ends the process as it would have
}

}  // namespace

void install_bus_error_handler() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action {};
        action.sa_handler = on_bus_error;
        sigemptyset(&action.sa_mask);
        sigaction(SIGBUS, &action, nullptr);
    });
}

bool touch_mapped(void (*touch)(void*), void* context) {
    sigjmp_buf here;
    if (sigsetjmp(here, 1) != 0) {  // with the signal mask: the jump leaves the handler, which blocks signals
        escape = nullptr;
        return false;
    }
    escape = &here;
    std::atomic_signal_fence(std::memory_order_seq_cst);
    touch(context);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    escape = nullptr;
    return true;
}

}  // namespace meki
