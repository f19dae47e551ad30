/* Preloaded, shows the capacities of processor cores that a directory describes: $FAKE_CPUS/cpu0/cpu_capacity, … */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef FILE* open_file(const char* path, const char* mode);

static FILE* open_fake(const char* path, const char* mode, const char* function) {
    static const char real[] = "/sys/devices/system/cpu";
    char fake[4096];
    const size_t length = strlen(path), end = strlen("/cpu_capacity");
    if (strncmp(path, real, strlen(real)) == 0 && length > end && strcmp(path + length - end, "/cpu_capacity") == 0) {
        snprintf(fake, sizeof fake, "%s%s", getenv("FAKE_CPUS"), path + strlen(real));
        path = fake;
    }
    return ((open_file*)dlsym(RTLD_NEXT, function))(path, mode);
}

FILE* fopen(const char* path, const char* mode) { return open_fake(path, mode, "fopen"); }
FILE* fopen64(const char* path, const char* mode) { return open_fake(path, mode, "fopen64"); }
