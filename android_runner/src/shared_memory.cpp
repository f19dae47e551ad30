#include "shared_memory.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "error.h"

namespace meki {

SharedMemory::SharedMemory(std::shared_ptr<Ort::Session> session)
    : session_(std::move(session)), allocator_(*session_, info()) {}

Ort::MemoryInfo SharedMemory::info() { return {"QnnHtpShared", OrtDeviceAllocator, 0, OrtMemTypeDefault}; }

void* SharedMemory::allocate(std::size_t num_bytes) {
    std::string reason = "the provider gives none";
    try {
        if (void* const data = allocator_.Alloc(std::max<std::size_t>(num_bytes, 1)); data != nullptr) {
            return data;
        }
    } catch (const std::exception& error) {
        reason = error.what();
    }
    throw Error("no " + std::to_string(num_bytes) + " bytes of memory to share with the NPU: " + reason,
                "libcdsprpc.so", "use a smaller model, a shorter context, or --npu-memory copied");
}

void SharedMemory::free(void* data) noexcept {
    try {
        allocator_.Free(data);
    } catch (const std::exception&) {
        // The provider says so in its log, and there is nothing left to do.
    }
}

}  // namespace meki
