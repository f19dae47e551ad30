// What every program's main does: the clock, the signals, and errors as one line and an exit status.
#pragma once

#include <string>
#include <vector>

namespace meki {

// Calls `run` with the arguments after the program's name. Returns 0, or 1 after an error, 2 after a
// UsageError, and 128 + n where signal n came.
int run_program(const char* name, int argc, char** argv, void (*run)(const std::vector<std::string>& arguments));

}  // namespace meki
