// Stands in for the harness where the harness must go wrong. MISBEHAVE, when it is compiled, says how:
// 1 writes its report and crashes, 2 sleeps, 3 complains about the NPU and fails, 4 ends well without a report.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char* report_path(int argc, char** argv) {
    for (int i = 1; i + 1 < argc; ++i) {
        if (strcmp(argv[i], "--output") == 0) {
            return argv[i + 1];
        }
    }
    return "/dev/null";
}

int main(int argc, char** argv) {
    if (MISBEHAVE == 1) {
        FILE* report = fopen(report_path(argc, argv), "w");
        fputs("{\"schema\": 1, \"half\": \"done\"}", report);
        fclose(report);
        fputs("about to crash\n", stderr);
        fflush(stderr);
        raise(SIGSEGV);
    }
    if (MISBEHAVE == 2) {
        signal(SIGHUP, SIG_IGN);  // as if the phone's adb daemon did not tell that the client went away
        sleep(600);
    }
    if (MISBEHAVE == 3) {
        fputs("[ERROR] Could not create context from binary for context index = 0 : err 5005\n", stderr);
        return 1;
    }
    return 0;
}
