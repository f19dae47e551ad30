// A zeroed array whose start is page-aligned, as O_DIRECT and vector loads want it. Large ones lie
// on huge pages where the system has them: a step streams through the whole KV cache.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace meki {

template <typename T>
class Buffer {
public:
    explicit Buffer(std::size_t size = 0) : size_(size), data_(allocate(size)) { clear(); }

    T* data() const { return data_.get(); }
    std::size_t size() const { return size_; }
    void clear() { std::fill_n(data_.get(), size_, T{}); }

private:
    static constexpr std::size_t page_bytes = 4096;
    static constexpr std::size_t huge_page_bytes = 2u << 20;
    static constexpr std::size_t max_bytes = SIZE_MAX / 2;

    struct Free {
        void operator()(T* pointer) const { std::free(pointer); }
    };

    static T* allocate(std::size_t size) {
        if (size > max_bytes / sizeof(T)) {  // what a file asks for may not even be a number of bytes
            throw std::bad_alloc();
        }
        const std::size_t bytes = size * sizeof(T);
        const std::size_t alignment = bytes < huge_page_bytes ? page_bytes : huge_page_bytes;
        const std::size_t rounded = (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
        void* data = std::aligned_alloc(alignment, rounded);
        if (data == nullptr) {
            throw std::bad_alloc();
        }
        if (alignment == huge_page_bytes) {
            ::madvise(data, rounded, MADV_HUGEPAGE);  // a wish: ordinary pages do as well
        }
        return static_cast<T*>(data);
    }

    std::size_t size_;
    std::unique_ptr<T[], Free> data_;
};

}  // namespace meki
