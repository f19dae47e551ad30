// Where the memory of buffers comes from: the host's own, or memory that an NPU sees as well.
#pragma once

#include <cstddef>

namespace meki {

class Allocator {
public:
    virtual ~Allocator() = default;

    // `num_bytes` that start at a page, with anything in them. Throws std::bad_alloc, or Error with the reason.
    virtual void* allocate(std::size_t num_bytes) = 0;
    virtual void free(void* data) noexcept = 0;
};

// The C library's. Much memory lies on huge pages where the system has them: a step streams through the whole KV
// cache.
Allocator& host_allocator();

}  // namespace meki
