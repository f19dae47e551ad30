#include "huge_pages.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

namespace meki {

void restart_with_huge_pages(char** argv) {
#ifdef __GLIBC__
    constexpr const char* variable = "GLIBC_TUNABLES";
    constexpr const char* name = "glibc.malloc.hugetlb";
    const char* set = std::getenv(variable);
    const std::string tunables = set == nullptr ? "" : set;
    if (tunables.find(name) != std::string::npos) {
        return;
    }
    const std::string separator = tunables.empty() ? "" : ":";
    if (::setenv(variable, (tunables + separator + name + "=1").c_str(), 1) == 0) {
        ::execv("/proc/self/exe", argv);
    }
    // Still here: go on with ordinary pages.
#else
    static_cast<void>(argv);
#endif
}

}  // namespace meki
