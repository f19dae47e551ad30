// Threads that the system may refuse.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "error.h"

namespace meki {

// A thread that runs `function`. Throws Error if the system has none to give.
template <typename Function>
std::thread start_thread(Function function) {
    try {
        return std::thread(std::move(function));
    } catch (const std::system_error& error) {
        throw Error(std::string("cannot start a thread: ") + error.what(), "this process",
                    "raise its limits on threads and memory, or ask for fewer threads");
    }
}

}  // namespace meki
