#include "allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace meki {

namespace {

constexpr std::size_t page_bytes = 4096;
constexpr std::size_t huge_page_bytes = 2u << 20;

class HostAllocator final : public Allocator {
public:
    void* allocate(std::size_t num_bytes) override {
        const std::size_t alignment = num_bytes < huge_page_bytes ? page_bytes : huge_page_bytes;
        if (num_bytes > SIZE_MAX - alignment) {
            throw std::bad_alloc();
        }
        const std::size_t rounded = (std::max<std::size_t>(num_bytes, 1) + alignment - 1) / alignment * alignment;
        void* data = std::aligned_alloc(alignment, rounded);
        if (data == nullptr) {
            throw std::bad_alloc();
        }
        if (alignment == huge_page_bytes) {
            ::madvise(data, rounded, MADV_HUGEPAGE);  // a wish: ordinary pages do as well
        }
        return data;
    }

    void free(void* data) noexcept override { std::free(data); }
};

}  // namespace

Allocator& host_allocator() {
    static HostAllocator allocator;
    return allocator;
}

}  // namespace meki
