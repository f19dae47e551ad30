// SIGINT and SIGTERM, noticed between steps so that everything is put away.
#pragma once

namespace meki {

struct Interrupted {
    int signal;
};

// The first signal is remembered; a second one ends the process at once.
void watch_signals();
// Throws Interrupted if a signal came.
void throw_if_interrupted();

}  // namespace meki
