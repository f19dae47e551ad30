/* Stands in for the memory of a phone that its CPU and its NPU share, on a host: one library under two names.
 *
 * As libcdsprpc.so it is FastRPC's allocator: each piece of memory has a file descriptor (here of memfd_create).
 *
 * As the QNN library it is the real one, whose path PHONE_QNN_LIBRARY names, plus what Qualcomm's simulator leaves out:
 * memory is registered by its descriptor, and a tensor with such a handle is what the simulator finds through a map of
 * its own of that descriptor. So a graph works on the caller's bytes only if each handle stands for the right memory.
 *
 * What was done is counted, and written to the file that PHONE_LOG names when the process ends. PHONE_MEMORY_BYTES
 * limits the memory. The structures are those of QNN's C interface, version 2, as far as they are needed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_PIECES 4096

static struct {
    uint64_t allocated, freed, registered, deregistered, runs, shared_tensors, copied_tensors, bytes;
} counts;

static struct {
    void* data; /* null: free */
    int descriptor;
    size_t size;
} pieces[MAX_PIECES];

static void stop(const char* what) {
    fprintf(stderr, "phone_memory: %s\n", what);
    abort();
}

__attribute__((destructor)) static void write_log(void) {
    const char* path = getenv("PHONE_LOG");
    FILE* file = path == NULL || counts.allocated == 0 ? NULL : fopen(path, "w");
    if (file == NULL) {
        return;
    }
    fprintf(file,
            "{\"allocated\": %lu, \"freed\": %lu, \"registered\": %lu, \"deregistered\": %lu, \"runs\": %lu, "
            "\"shared_tensors\": %lu, \"copied_tensors\": %lu}\n",
            counts.allocated, counts.freed, counts.registered, counts.deregistered, counts.runs, counts.shared_tensors,
            counts.copied_tensors);
    fclose(file);
}

static int piece_of(const void* data) {
    for (int i = 0; i < MAX_PIECES; ++i) {
        if (pieces[i].data == data) {
            return i;
        }
    }
    return -1;
}

/* FastRPC */

EXPORT void* rpcmem_alloc(int heap, uint32_t flags, int size) {
    const char* limit = getenv("PHONE_MEMORY_BYTES");
    if (heap != 25 || flags != 1 || size <= 0) {
        stop("not the system's heap with the default flags");
    }
    if (limit != NULL && counts.bytes + (uint64_t)size > strtoull(limit, NULL, 10)) {
        return NULL;
    }
    const int free_piece = piece_of(NULL);
    const int descriptor = memfd_create("rpcmem", MFD_CLOEXEC);
    if (free_piece < 0 || descriptor < 0 || ftruncate(descriptor, size) != 0) {
        stop("no more memory");
    }
    void* data = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (data == MAP_FAILED) {
        stop("no map");
    }
    memset(data, 0xa5, (size_t)size); /* it has been used before */
    pieces[free_piece].data = data;
    pieces[free_piece].descriptor = descriptor;
    pieces[free_piece].size = (size_t)size;
    counts.bytes += (uint64_t)size;
    ++counts.allocated;
    return data;
}

EXPORT void rpcmem_free(void* data) {
    const int i = piece_of(data);
    if (data == NULL || i < 0) {
        stop("freed what was not allocated");
    }
    munmap(data, pieces[i].size);
    close(pieces[i].descriptor);
    counts.bytes -= pieces[i].size;
    pieces[i].data = NULL;
    ++counts.freed;
}

EXPORT int rpcmem_to_fd(void* data) {
    const int i = piece_of(data);
    return data == NULL || i < 0 ? -1 : pieces[i].descriptor;
}

EXPORT void remote_register_buf_attr2(void* data, size_t size, int descriptor, int attributes) {
    (void)data, (void)size, (void)descriptor, (void)attributes;
}

/* QNN */

enum { GRAPH_EXECUTE = 21, MEM_REGISTER = 35, MEM_DEREGISTER = 36, NUM_FUNCTIONS = 64 };
enum { MEMORY_RAW = 0, MEMORY_HANDLE = 1, DESCRIPTOR_CUSTOM = 2, SHARED_BUFFER = 1 };

typedef void (*function)(void);

typedef struct {
    uint32_t backend_id;
    const char* name;
    uint32_t version[6];
    function functions[NUM_FUNCTIONS];
} interface;

typedef struct {
    uint32_t version;
    struct {
        uint32_t id;
        const char* name;
        uint32_t type, data_format, data_type;
        uint64_t quantization[5];
        uint32_t rank;
        const uint32_t* dimensions;
        uint32_t memory_type;
        union {
            struct {
                void* data;
                uint32_t size;
            } buffer;
            void* handle;
        } memory;
        uint64_t more[3];
    } is;
} tensor;

typedef struct {
    uint32_t type;
    uint64_t size;
    int32_t descriptor;
    uint64_t offset;
} shared_buffer;

typedef struct {
    uint32_t rank;
    const uint32_t* dimensions;
    const void* configuration;
    uint32_t data_type, memory_type;
    const shared_buffer* buffer;
} descriptor;

typedef struct {
    char* map; /* of all of it */
    size_t map_size, offset, tensor_size;
} handle;

typedef uint64_t (*execute_function)(void*, const tensor*, uint32_t, tensor*, uint32_t, void*, void*);
typedef uint64_t (*providers_function)(const interface***, uint32_t*);

static interface ours;
static execute_function execute;

/* Bytes: QNN's data types end in their bits, as hexadecimal digits that are read as decimal ones. */
static size_t size_of(uint32_t data_type, uint32_t rank, const uint32_t* dimensions) {
    size_t bytes = ((data_type >> 4 & 15) * 10 + (data_type & 15)) / 8;
    for (uint32_t i = 0; i < rank; ++i) {
        bytes *= dimensions[i];
    }
    return bytes;
}

static uint64_t register_memory(void* context, const descriptor* memory, uint32_t count, void** handles) {
    (void)context;
    for (uint32_t i = 0; i < count; ++i) {
        const shared_buffer* buffer = memory[i].buffer;
        if (memory[i].memory_type != DESCRIPTOR_CUSTOM || buffer->type != SHARED_BUFFER) {
            stop("not a shared buffer");
        }
        handle* made = malloc(sizeof *made);
        made->offset = buffer->offset;
        made->tensor_size = size_of(memory[i].data_type, memory[i].rank, memory[i].dimensions);
        made->map_size = buffer->size;
        made->map = mmap(NULL, made->map_size, PROT_READ | PROT_WRITE, MAP_SHARED, buffer->descriptor, 0);
        if (made->map == MAP_FAILED || made->offset + made->tensor_size > made->map_size) {
            stop("a tensor does not lie in its memory");
        }
        handles[i] = made;
        ++counts.registered;
    }
    return 0;
}

static uint64_t deregister_memory(void** handles, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
        handle* gone = handles[i];
        munmap(gone->map, gone->map_size);
        free(gone);
        ++counts.deregistered;
    }
    return 0;
}

/* The tensors as the simulator takes them. */
static tensor* resolved(const tensor* given, uint32_t count) {
    tensor* all = malloc(count * sizeof *all);
    memcpy(all, given, count * sizeof *all);
    for (uint32_t i = 0; i < count; ++i) {
        if (all[i].is.memory_type != MEMORY_HANDLE) {
            ++counts.copied_tensors;
            continue;
        }
        const handle* memory = all[i].is.memory.handle;
        const size_t size = size_of(all[i].is.data_type, all[i].is.rank, all[i].is.dimensions);
        if (size > memory->tensor_size) {
            stop("a tensor is larger than what was registered");
        }
        all[i].is.memory_type = MEMORY_RAW;
        all[i].is.memory.buffer.data = memory->map + memory->offset;
        all[i].is.memory.buffer.size = (uint32_t)size;
        ++counts.shared_tensors;
    }
    return all;
}

static uint64_t execute_graph(void* graph, const tensor* inputs, uint32_t num_inputs, tensor* outputs,
                              uint32_t num_outputs, void* profile, void* signal) {
    tensor* in = resolved(inputs, num_inputs);
    tensor* out = resolved(outputs, num_outputs);
    const uint64_t status = execute(graph, in, num_inputs, out, num_outputs, profile, signal);
    free(in);
    free(out);
    ++counts.runs;
    return status;
}

EXPORT uint64_t QnnInterface_getProviders(const interface*** providers, uint32_t* count) {
    static const interface* all[] = {&ours};
    const char* path = getenv("PHONE_QNN_LIBRARY");
    void* library = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        stop("PHONE_QNN_LIBRARY does not name the QNN library");
    }
    const providers_function get_providers = (providers_function)dlsym(library, "QnnInterface_getProviders");
    const uint64_t status = get_providers(providers, count);
    if (status != 0 || *count != 1) {
        stop("QNN has not one interface");
    }
    memcpy(&ours, **providers, sizeof ours);
    execute = (execute_function)ours.functions[GRAPH_EXECUTE];
    ours.functions[GRAPH_EXECUTE] = (function)execute_graph;
    ours.functions[MEM_REGISTER] = (function)register_memory;
    ours.functions[MEM_DEREGISTER] = (function)deregister_memory;
    *providers = all;
    return 0;
}
