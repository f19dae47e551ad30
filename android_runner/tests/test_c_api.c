/* The C API from C11: without arguments its errors, with them a generation that prints what it chose.
 *
 *     test_c_api BUNDLE ORT_LIBRARY COUNT ID...
 *
 * prints COUNT new ids after the prompt ID..., once a line, and then checks statistics, reset and a full context.
 *
 *     test_c_api BUNDLE ORT_LIBRARY
 *
 * prints what comes of verify_rows, and then on how many cores each thread may run that meki_open starts: without
 * big_cores, and with it.
 *
 *     test_c_api BUNDLE ORT_LIBRARY npu QNN_LIBRARY QNN_PROVIDER ID...
 *
 * opens runners on the NPU, beside each other and one after the other, and prints what each of them chose.
 */
#define _GNU_SOURCE /* for affinities, which Linux alone has */
#include <dirent.h>
#include <meki_runner.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                      \
        }                                                                    \
    } while (0)

static int says(const char* text) { return strstr(meki_last_error(), text) != NULL; }

static meki_options filled(const char* bundle, const char* library) {
    meki_options options;
    meki_default_options(&options, sizeof options);
    options.bundle = bundle;
    options.ort_library = library;
    return options;
}

static void test_refused_options(void) {
    meki_runner* runner = (meki_runner*)&failures;
    meki_options options = filled("nowhere", "nowhere.so");
    CHECK(meki_open(NULL, &runner) == MEKI_ERROR_ARGUMENT && runner == NULL);
    CHECK(meki_open(&options, NULL) == MEKI_ERROR_ARGUMENT);
    options.struct_size = 1;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("meki_default_options"));
    options = filled(NULL, "nowhere.so");
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("null"));
    options = filled("nowhere", "nowhere.so");
    options.threads = 0;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("threads is 0"));
    options = filled("nowhere", "nowhere.so");
    options.io = 3;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("io is 3"));
    options = filled("nowhere", "nowhere.so");
    options.io = MEKI_IO_MMAP;
    options.row_cache_bytes = 1;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("row_cache_bytes"));
    options = filled("nowhere", "nowhere.so");
    options.compute = MEKI_COMPUTE_NPU;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("qnn_library"));
    options.compute = 2;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("compute is 2"));
    options = filled("nowhere", "nowhere.so");
    options.top_p = 1.5;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("top_p"));
    options = filled("nowhere", "nowhere.so");
    options.big_cores = 2;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("big_cores is 2"));
    options = filled("nowhere", "nowhere.so");
    options.verify_rows = -1;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("verify_rows is -1"));
    options = filled("nowhere", "nowhere.so");
    options.npu_memory = MEKI_NPU_MEMORY_COPIED;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("needs MEKI_COMPUTE_NPU"));
    options.npu_memory = 3;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("npu_memory is 3"));
    options = filled("nowhere", "nowhere.so");
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_LIBRARY && says("cannot load ONNX Runtime"));
    CHECK(runner == NULL && strchr(meki_last_error(), '\n') == NULL);
}

/* An app that was built before a member was there has options that end where it begins. */
static void test_options_of_an_older_header(void) {
    const size_t older = offsetof(meki_options, big_cores);
    meki_runner* runner = NULL;
    meki_options options, untouched;
    memset(&options, 0x5a, sizeof options);
    untouched = options;
    meki_default_options(&options, older);
    CHECK(options.struct_size == older && options.threads == 2 && options.qnn_library == NULL);
    CHECK(memcmp(&options.big_cores, &untouched.big_cores, sizeof options - older) == 0);
    options.bundle = "nowhere";
    options.ort_library = "nowhere.so";
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_LIBRARY); /* whatever lies behind them */
    options.struct_size = 0;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("meki_default_options"));
    options.struct_size = sizeof options + 1;
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_ARGUMENT && says("meki_default_options"));
}

static void test_null_runners(void) {
    const uint32_t id = 0;
    meki_stats_data stats = {0};
    CHECK(meki_prefill(NULL, &id, 1, NULL) == MEKI_ERROR_ARGUMENT);
    CHECK(meki_step(NULL, 0, NULL) == MEKI_ERROR_ARGUMENT);
    CHECK(meki_stats(NULL, &stats) == MEKI_ERROR_ARGUMENT);
    CHECK(meki_reset(NULL) == MEKI_ERROR_ARGUMENT);
    CHECK(meki_logits(NULL) == NULL && meki_vocab_size(NULL) == 0 && meki_length(NULL) == 0);
    CHECK(meki_context_length(NULL) == 0);
    meki_close(NULL);
    meki_default_options(NULL, sizeof(meki_options));
    CHECK(strlen(meki_version()) > 0);
}

/* Feeds the prompt and `count` - 1 of the tokens chosen after it. */
static void generate(meki_runner* runner, const uint32_t* prompt, size_t length, uint32_t* chosen, size_t count) {
    CHECK(meki_prefill(runner, prompt, length, &chosen[0]) == MEKI_OK);
    for (size_t i = 1; i < count; ++i) {
        CHECK(meki_step(runner, chosen[i - 1], &chosen[i]) == MEKI_OK);
    }
    CHECK(meki_length(runner) == length + count - 1);
}

static void test_statistics(const meki_runner* runner, size_t length, size_t count) {
    meki_stats_data stats = {0};
    CHECK(meki_stats(runner, &stats) == MEKI_ERROR_ARGUMENT);
    stats.struct_size = sizeof stats;
    CHECK(meki_stats(runner, &stats) == MEKI_OK);
    CHECK(stats.prefill_tokens == length && stats.step_tokens == count - 1);
    CHECK(stats.load_us > 0 && stats.prefill_us > 0 && stats.step_us > 0);
    CHECK(stats.run_us > 0 && stats.run_us <= stats.prefill_us + stats.step_us);
    CHECK((stats.rows_read > 0) == (stats.bytes_read > 0) && stats.stall_us <= stats.prefill_us + stats.step_us);
    CHECK(stats.deadlines_missed > 0 || stats.stall_us == 0);
}

/* A refusal leaves the runner as it was. */
static void test_refusals(meki_runner* runner, uint32_t id) {
    const uint32_t outside = (uint32_t)meki_vocab_size(runner);
    const size_t length = meki_length(runner);
    const size_t room = meki_context_length(runner) - length;
    uint32_t* many = malloc((room + 1) * sizeof *many);
    for (size_t i = 0; i <= room; ++i) {
        many[i] = id;
    }
    CHECK(meki_step(runner, outside, NULL) == MEKI_ERROR_ARGUMENT && says("is out of range"));
    CHECK(meki_prefill(runner, many, 0, NULL) == MEKI_ERROR_ARGUMENT);
    CHECK(meki_prefill(runner, many, room + 1, NULL) == MEKI_ERROR_CONTEXT_FULL && says("do not fit"));
    CHECK(meki_length(runner) == length);
    CHECK(meki_prefill(runner, many, room, NULL) == MEKI_OK);
    CHECK(meki_step(runner, id, NULL) == MEKI_ERROR_CONTEXT_FULL);
    free(many);
}

static void test_bundle(const char* bundle, const char* library, size_t count, const uint32_t* prompt, size_t length) {
    meki_runner* runner = NULL;
    meki_runner* other = NULL;
    meki_options options = filled("nowhere", library);
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_BUNDLE && runner == NULL && says("nowhere"));
    options.bundle = bundle;
    if (meki_open(&options, &runner) != MEKI_OK) {
        fprintf(stderr, "%s\n", meki_last_error());
        ++failures;
        return;
    }
    uint32_t* chosen = malloc(2 * count * sizeof *chosen);
    CHECK(meki_logits(runner) == NULL);
    generate(runner, prompt, length, chosen, count);
    for (size_t i = 0; i < count; ++i) {
        printf("%u\n", (unsigned)chosen[i]);
    }
    const float* logits = meki_logits(runner);
    for (size_t id = 0; id < meki_vocab_size(runner); ++id) {
        CHECK(logits[id] <= logits[chosen[count - 1]]);
    }
    test_statistics(runner, length, count);
    CHECK(meki_reset(runner) == MEKI_OK && meki_length(runner) == 0 && meki_logits(runner) == NULL);
    generate(runner, prompt, length, chosen + count, count);
    CHECK(memcmp(chosen, chosen + count, count * sizeof *chosen) == 0);
    options.io = MEKI_IO_MMAP; /* a second runner, with its own tokens */
    options.big_cores = 1;
    CHECK(meki_open(&options, &other) == MEKI_OK);
    generate(other, prompt, length, chosen + count, count);
    CHECK(memcmp(chosen, chosen + count, count * sizeof *chosen) == 0);
    test_refusals(runner, prompt[0]);
    meki_close(other);
    meki_close(runner);
    options.ort_library = "another.so";
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_LIBRARY && says("already"));
    free(chosen);
}

#define MAX_THREADS 64

/* This process's threads. */
static size_t list_threads(int* ids) {
    size_t count = 0;
    DIR* directory = opendir("/proc/self/task");
    CHECK(directory != NULL);
    for (struct dirent* entry; (entry = readdir(directory)) != NULL && count < MAX_THREADS;) {
        if (entry->d_name[0] != '.') {
            ids[count++] = atoi(entry->d_name);
        }
    }
    closedir(directory);
    return count;
}

/* Opens the bundle, and prints on how many cores each thread may run that began with that. */
static void test_cores(const meki_options* options) {
    meki_runner* runner = NULL;
    int ids[MAX_THREADS], known[MAX_THREADS];
    cpu_set_t before, after, cores;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    const size_t num_known = list_threads(known);
    CHECK(meki_open(options, &runner) == MEKI_OK);
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&before, &after));
    const size_t count = list_threads(ids);
    printf("big_cores %d:", (int)options->big_cores);
    for (size_t i = 0, j; i < count; ++i) {
        for (j = 0; j < num_known && known[j] != ids[i]; ++j) {
        }
        if (j == num_known) {
            CHECK(sched_getaffinity(ids[i], sizeof cores, &cores) == 0);
            printf(" %d", CPU_COUNT(&cores));
        }
    }
    printf("\n");
    meki_close(runner);
}

static void test_options(const char* bundle, const char* library) {
    meki_runner* runner = NULL;
    meki_options options = filled(bundle, library);
    options.verify_rows = 1;
    const meki_status verified = meki_open(&options, &runner);
    CHECK(verified == MEKI_OK || verified == MEKI_ERROR_BUNDLE);
    CHECK(verified != MEKI_OK || meki_step(runner, 0, NULL) == MEKI_OK);
    printf("verify_rows: %s\n", verified == MEKI_OK ? "ok" : meki_last_error());
    meki_close(runner);
    options.verify_rows = 0;
    test_cores(&options);
    options.big_cores = 1;
    test_cores(&options);
    options.bundle = "nowhere"; /* which is found out when threads are there already */
    cpu_set_t before, after;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    CHECK(meki_open(&options, &runner) == MEKI_ERROR_BUNDLE);
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&before, &after));
}

enum { NPU_COUNT = 3 };

static void print_generated(meki_runner* runner, const uint32_t* prompt, size_t length) {
    uint32_t chosen[NPU_COUNT];
    generate(runner, prompt, length, chosen, NPU_COUNT);
    for (size_t i = 0; i < NPU_COUNT; ++i) {
        printf("%u%c", (unsigned)chosen[i], i + 1 < NPU_COUNT ? ' ' : '\n');
    }
}

/* A runner on the CPU keeps ONNX Runtime's environment, and so the provider of the first one on the NPU. */
static void test_npu(char** argv, const uint32_t* prompt, size_t length) {
    meki_runner* cpu = NULL;
    meki_runner* npu[2] = {NULL, NULL};
    meki_options options = filled(argv[1], argv[2]);
    CHECK(meki_open(&options, &cpu) == MEKI_OK);
    options.compute = MEKI_COMPUTE_NPU;
    options.qnn_library = argv[4];
    options.qnn_provider = argv[5];
    for (int round = 0; round < 2; ++round) {
        for (int i = 0; i < 2; ++i) {
            options.npu_memory = i == 0 ? MEKI_NPU_MEMORY_AUTO : MEKI_NPU_MEMORY_COPIED;
            if (meki_open(&options, &npu[i]) != MEKI_OK) {
                fprintf(stderr, "%s\n", meki_last_error());
                ++failures;
                return;
            }
        }
        print_generated(npu[0], prompt, length);
        print_generated(npu[1], prompt, length);
        meki_close(npu[round]);
        meki_close(npu[1 - round]);
    }
    options.qnn_provider = argv[4];
    CHECK(meki_open(&options, &npu[0]) == MEKI_ERROR_BUNDLE && says("another QNN provider already"));
    print_generated(cpu, prompt, length);
    meki_close(cpu);
}

/* The words from `first` on, as ids. */
static uint32_t* ids_of(int argc, char** argv, int first) {
    uint32_t* ids = malloc((size_t)(argc - first) * sizeof *ids);
    for (int i = first; i < argc; ++i) {
        ids[i - first] = (uint32_t)strtoul(argv[i], NULL, 10);
    }
    return ids;
}

int main(int argc, char** argv) {
    test_refused_options();
    test_options_of_an_older_header();
    test_null_runners();
    if (argc == 3) {
        test_options(argv[1], argv[2]);
    } else if (argc > 6 && strcmp(argv[3], "npu") == 0) {
        uint32_t* prompt = ids_of(argc, argv, 6);
        test_npu(argv, prompt, (size_t)argc - 6);
        free(prompt);
    } else if (argc > 4) {
        uint32_t* prompt = ids_of(argc, argv, 4);
        test_bundle(argv[1], argv[2], (size_t)strtoul(argv[3], NULL, 10), prompt, (size_t)argc - 4);
        free(prompt);
    }
    return failures == 0 ? 0 : 1;
}
