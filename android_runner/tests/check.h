// The tests' only tool: a check that holds in every build type and says where it failed.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "error.h"

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                             \
        }                                                                             \
    } while (false)

// Runs `call`, which must throw meki::Error, and returns its message.
template <typename Call>
std::string error_of(Call call) {
    try {
        call();
    } catch (const meki::Error& error) {
        return error.what();
    }
    std::fprintf(stderr, "no error was thrown\n");
    std::exit(1);
}

// `call` must throw meki::Error whose message contains `part`.
#define CHECK_ERROR(call, part)                                                                          \
    do {                                                                                                 \
        const std::string message = error_of([&] { call; });                                             \
        if (message.find(part) == std::string::npos) {                                                   \
            std::fprintf(stderr, "%s:%d: '%s' lacks '%s'\n", __FILE__, __LINE__, message.c_str(), part); \
            std::exit(1);                                                                                \
        }                                                                                                \
    } while (false)
