/* Runs a bundle of `meki-edge pack` inside an app: link libmeki_runner, no JNI and no process of its own.
 *
 *     meki_options options;
 *     meki_default_options(&options, sizeof options);
 *     options.bundle = "/data/user/0/app/files/meki";
 *     options.ort_library = "libonnxruntime.so";        // as dlopen finds it
 *     meki_runner* runner;
 *     if (meki_open(&options, &runner) != MEKI_OK) { log(meki_last_error()); … }
 *     uint32_t next;
 *     meki_prefill(runner, prompt, prompt_length, &next);
 *     while (next != end_of_text) { show(next); meki_step(runner, next, &next); }
 *     meki_close(runner);
 *
 * Token ids are those of the bundle's tokenizer.json. A runner belongs to one thread at a time; several runners may
 * live in a process, and share the library of ONNX Runtime that the first one named. The library installs a handler
 * for SIGBUS when it opens a bundle, since a file that shrinks under a map raises it; a SIGBUS of the app's own ends
 * the process as before. That guards rows and embeddings; the weights are mapped as well, and if their file shrinks
 * while a runner is open, that ends the process. It installs no other handler, prints nothing and starts only threads
 * that end in meki_close; ONNX Runtime may keep one of its own asleep until the process ends.
 */
#ifndef MEKI_RUNNER_H
#define MEKI_RUNNER_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MEKI_API __attribute__((visibility("default")))
#else
#define MEKI_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a call returns. The numbers stay as they are from version to version. */
typedef enum meki_status {
    MEKI_OK = 0,
    MEKI_ERROR_ARGUMENT = 1,     /* a null pointer, no tokens, an id or an option out of range: nothing was done */
    MEKI_ERROR_CONTEXT_FULL = 2, /* the tokens do not fit any more: nothing was fed; meki_reset makes room */
    MEKI_ERROR_LIBRARY = 3,      /* ONNX Runtime cannot be loaded, or another one is loaded already */
    MEKI_ERROR_BUNDLE = 4,       /* the bundle is not there, not whole, or its parts do not fit together */
    MEKI_ERROR_RUN = 5,          /* a step failed (storage, a damaged row, the graph): the runner can only be closed */
    MEKI_ERROR_MEMORY = 6,       /* out of memory; after prefill or step the runner can only be closed */
    MEKI_ERROR_INTERNAL = 7      /* a mistake of this library; as MEKI_ERROR_RUN */
} meki_status;

/* How rows are read from storage. */
typedef enum meki_io {
    MEKI_IO_PREAD = 0,  /* through the page cache */
    MEKI_IO_DIRECT = 1, /* past it */
    MEKI_IO_MMAP = 2    /* a map of the file */
} meki_io;

/* Where the graphs run. */
typedef enum meki_compute {
    MEKI_COMPUTE_CPU = 0,
    MEKI_COMPUTE_NPU = 1 /* the bundle's Hexagon binaries; needs qnn_library */
} meki_compute;

/* How inputs and outputs come to the NPU. */
typedef enum meki_npu_memory {
    MEKI_NPU_MEMORY_AUTO = 0,   /* shared where the system has libcdsprpc.so, which an app must name in its manifest */
    MEKI_NPU_MEMORY_SHARED = 1, /* they lie in memory that the NPU sees */
    MEKI_NPU_MEMORY_COPIED = 2  /* they are copied in each step */
} meki_npu_memory;

typedef struct meki_options {
    size_t struct_size;       /* set by meki_default_options: later versions may add members at the end */
    const char* bundle;       /* the directory */
    const char* ort_library;  /* ONNX Runtime's library, by path or by name */
    int32_t threads;          /* of the graph, 1 to 1024; 2 by default */
    int32_t io;               /* a meki_io; MEKI_IO_PREAD by default */
    uint64_t row_cache_bytes; /* memory for rows that are wanted again; 0, the default: none. Not with MEKI_IO_MMAP */
    double temperature;       /* 0, the default: the likeliest token; else how far the choice spreads */
    uint64_t top_k;           /* choose among the k likeliest; 0, the default: all */
    double top_p;             /* choose among the likeliest with this total probability; 1, the default: all */
    uint64_t seed;            /* of the choice */
    int32_t compute;          /* a meki_compute; MEKI_COMPUTE_CPU by default */
    const char* qnn_library;  /* libQnnHtp.so, by path or by name; null unless MEKI_COMPUTE_NPU */
    const char* qnn_provider; /* libonnxruntime_providers_qnn.so where it is a plug-in; null: built in */
    int32_t big_cores;        /* 1: the runner's threads keep off a phone's slowest cores: see meki_open; else 0 */
    int32_t verify_rows;      /* 1: each row of a ROM file is compared with its checksum, which it must have; else 0 */
    int32_t npu_memory;       /* a meki_npu_memory; MEKI_NPU_MEMORY_AUTO by default, and unless MEKI_COMPUTE_NPU */
} meki_options;

/* Totals since meki_open or meki_reset; times in microseconds. */
typedef struct meki_stats_data {
    size_t struct_size;        /* to be set to sizeof(meki_stats_data) before the call */
    uint64_t load_us;          /* what meki_open took */
    uint64_t prefill_tokens;
    uint64_t prefill_us;
    uint64_t step_tokens;
    uint64_t step_us;
    uint64_t run_us;           /* inside the graphs, of both */
    uint64_t io_us;            /* the reader threads: fetching and decoding rows, beside the graph */
    uint64_t stall_us;         /* the part of it that a graph had to wait for */
    uint64_t deadlines_missed; /* times that it had to */
    uint64_t bytes_read;       /* of rows, asked of the storage */
    uint64_t rows_read;
    uint64_t cache_hits;       /* rows found in memory */
} meki_stats_data;

typedef struct meki_runner meki_runner;

/* Such as "0.1.0". */
MEKI_API const char* meki_version(void);

/* What went wrong in this thread's last call that failed: what, where and what to do, in one line of UTF-8. Valid
 * until this thread's next call. */
MEKI_API const char* meki_last_error(void);

/* Fills in the defaults and struct_size, which is sizeof(meki_options) in the app: a later library may know of more
 * members than the header that the app was built with, and leaves those at their defaults. */
MEKI_API void meki_default_options(meki_options* options, size_t struct_size);

/* Opens a bundle; `*runner` is null unless this returns MEKI_OK. Takes seconds for a large model.
 *
 * With `big_cores`, where the kernel tells of several kinds of cores: the threads that this starts, for rows and for
 * ONNX Runtime, stay off the slowest ones for good. A thread begins where the one that starts it is, so the calling
 * thread moves there too, and is back where it was when this returns. It runs its share of every graph: an app that
 * wants that on a fast core pins the thread that feeds tokens itself. Runners that are open at the same time share ONNX
 * Runtime's threads, whose number and cores are those that the first of them asked for. */
MEKI_API meki_status meki_open(const meki_options* options, meki_runner** runner);

/* Feeds `count` tokens after those fed before, and chooses the next one into `*next` (which may be null). */
MEKI_API meki_status meki_prefill(meki_runner* runner, const uint32_t* ids, size_t count, uint32_t* next);

/* Feeds one token and chooses the next one into `*next` (which may be null). */
MEKI_API meki_status meki_step(meki_runner* runner, uint32_t id, uint32_t* next);

/* Logits of the next token, `meki_vocab_size` of them, until the next call that feeds or resets; null before the
 * first token. */
MEKI_API const float* meki_logits(const meki_runner* runner);

MEKI_API size_t meki_vocab_size(const meki_runner* runner);
MEKI_API size_t meki_context_length(const meki_runner* runner); /* the most tokens that can be fed */
MEKI_API size_t meki_length(const meki_runner* runner);         /* tokens fed so far */

MEKI_API meki_status meki_stats(const meki_runner* runner, meki_stats_data* stats);

/* Forgets all tokens and statistics, and starts the sampler anew. */
MEKI_API meki_status meki_reset(meki_runner* runner);

/* Ends the runner and its threads; null is allowed. */
MEKI_API void meki_close(meki_runner* runner);

#ifdef __cplusplus
}
#endif

#endif
