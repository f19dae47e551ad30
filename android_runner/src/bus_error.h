// Touching a memory map that the file no longer backs.
//
// Where a mapped file shrank, or the storage cannot be read, the kernel answers a load with SIGBUS.
// The functions that read maps run here, so that it becomes an error and not the end of the process.
#pragma once

namespace meki {

// Installs the process's SIGBUS handler; call it before the first `touch_mapped`.
void install_bus_error_handler();

// Calls `touch(context)`, which may only copy out of a map: it owns nothing and does not throw.
// Returns false if it hit a SIGBUS, in which case it stopped there.
bool touch_mapped(void (*touch)(void*), void* context);

}  // namespace meki
