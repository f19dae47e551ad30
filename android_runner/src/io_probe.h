// Measures how fast the storage gives the rows of random tokens, by each way to read them.
#pragma once

#include "probe_report.h"

namespace meki {

// The bare methods read bytes: pread, direct (O_DIRECT, whole pages), mmap (asked for in one piece, then
// touched), faults (mmap, touched only, with the system's read-ahead), random faults (the same without
// read-ahead) and layers (a pread for each segment, as from a table a layer). Those called fetch are what the
// harness does: read and decode. A method that the file system does not support is left out. Methods take
// turns token by token, and the file is out of the page cache before each read; in the throughputs it is so
// before each method. Throws Error if the file cannot be read.
ProbeReport probe(const ProbeConfig& config);

}  // namespace meki
