// Preloaded into the test phone's shell: programs for 64-bit Arm are run by qemu, others as they are.
//
// MEKI_SYSROOT is what qemu takes for the root of the file system.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { max_arguments = 512 };

static int is_arm64(const char* path) {
    Elf64_Ehdr header;
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return 0;
    }
    const ssize_t count = read(file, &header, sizeof header);
    close(file);
    return count == (ssize_t)sizeof header && memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 &&
           header.e_machine == EM_AARCH64;
}

int execve(const char* path, char* const arguments[], char* const environment[]) {
    int (*const real)(const char*, char* const[], char* const[]) =
        (int (*)(const char*, char* const[], char* const[]))dlsym(RTLD_NEXT, "execve");
    if (!is_arm64(path)) {
        return real(path, arguments, environment);
    }
    if (access(path, X_OK) != 0) {
        return -1;
    }
    // The preloaded library is the host's: the guest's loader must not see it.
    char* emulated[max_arguments] = {"qemu-aarch64", "-cpu", "cortex-a76", "-U", "LD_PRELOAD",
                                     "-L", getenv("MEKI_SYSROOT"), "-0", arguments[0], (char*)path};
    size_t count = 10;
    for (size_t i = 1; arguments[i] != NULL; ++i) {
        if (count == max_arguments - 1) {
            errno = E2BIG;
            return -1;
        }
        emulated[count++] = arguments[i];
    }
    return real("/usr/bin/qemu-aarch64", emulated, environment);
}
