// Huge pages for the memory that the C library hands out.
#pragma once

namespace meki {

// Starts this program again, once, with glibc told to ask for huge pages: ONNX Runtime keeps its packed
// weights in memory from malloc, every step streams through all of them, and with pages of 4 KB the
// address translation alone costs some percent of it. glibc reads the setting only when a process
// starts. Leaves a setting of the user's alone, and does nothing on other C libraries.
void restart_with_huge_pages(char** argv);

}  // namespace meki
