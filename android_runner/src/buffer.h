// A zeroed array whose start is page-aligned, as O_DIRECT and vector loads want it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "allocator.h"

namespace meki {

template <typename T>
class Buffer {
public:
    // `allocator` must outlive it.
    explicit Buffer(std::size_t size = 0, Allocator& allocator = host_allocator())
        : size_(size), data_(allocate(size, allocator), Free{&allocator}) {
        clear();
    }

    T* data() const { return data_.get(); }
    std::size_t size() const { return size_; }
    void clear() { std::fill_n(data_.get(), size_, T{}); }

private:
    struct Free {
        Allocator* allocator;
        void operator()(T* pointer) const { allocator->free(pointer); }
    };

    static T* allocate(std::size_t size, Allocator& allocator) {
        if (size > SIZE_MAX / sizeof(T)) {  // what a file asks for may not even be a number of bytes
            throw std::bad_alloc();
        }
        return static_cast<T*>(allocator.allocate(size * sizeof(T)));
    }

    std::size_t size_;
    std::unique_ptr<T[], Free> data_;
};

}  // namespace meki
