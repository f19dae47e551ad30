// A zeroed array whose start is page-aligned, as O_DIRECT and vector loads want it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

namespace meki {

template <typename T>
class Buffer {
public:
    explicit Buffer(std::size_t size = 0)
        : size_(size), data_(static_cast<T*>(::operator new(size * sizeof(T), alignment))) {
        clear();
    }

    T* data() const { return data_.get(); }
    std::size_t size() const { return size_; }
    void clear() { std::fill_n(data_.get(), size_, T{}); }

private:
    static constexpr std::align_val_t alignment{4096};
    struct Free {
        void operator()(T* pointer) const { ::operator delete(pointer, alignment); }
    };
    std::size_t size_;
    std::unique_ptr<T[], Free> data_;
};

}  // namespace meki
