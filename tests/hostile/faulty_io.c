/* Preloaded into the harness: reads of one file that fail, that are cut to pieces, or that come late.
 *
 * FAULTY_FILE: the name's end. FAULTY_AFTER: so many reads of it succeed. FAULTY_MODE: "eio", "pieces" (one byte at
 * a time, every other call interrupted) or "late" (some take up to a millisecond more: others overtake them). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef ssize_t (*pread_function)(int, void *, size_t, off_t);

static int is_faulty(int descriptor) {
    static atomic_long reads;
    const char *name = getenv("FAULTY_FILE");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t length = readlink(link, path, sizeof path);
    if (name == NULL || length < (ssize_t)strlen(name) ||
        memcmp(path + length - strlen(name), name, strlen(name)) != 0) {
        return 0;
    }
    return atomic_fetch_add(&reads, 1) >= atol(getenv("FAULTY_AFTER"));
}

ssize_t pread(int descriptor, void *out, size_t size, off_t offset) {
    static atomic_long calls;
    pread_function next = (pread_function)dlsym(RTLD_NEXT, "pread");
    if (!is_faulty(descriptor)) {
        return next(descriptor, out, size, offset);
    }
    if (strcmp(getenv("FAULTY_MODE"), "eio") == 0) {
        errno = EIO;
        return -1;
    }
    const long call = atomic_fetch_add(&calls, 1);
    if (strcmp(getenv("FAULTY_MODE"), "late") == 0) {
        if (call % 5 == 0) {
            usleep((useconds_t)(call * 2654435761u % 1000));
        }
        return next(descriptor, out, size, offset);
    }
    if (call % 2 == 0) {
        errno = EINTR;
        return -1;
    }
    return next(descriptor, out, size > 0 ? 1 : 0, offset);
}

ssize_t pread64(int descriptor, void *out, size_t size, off_t offset) { return pread(descriptor, out, size, offset); }
