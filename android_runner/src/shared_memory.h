// Memory that the CPU and the NPU both see: tensors in it need no copy between them.
#pragma once

#include <memory>

#include "allocator.h"
#include "ort_api.h"

namespace meki {

// The QNN provider's allocator, which takes the memory from FastRPC (`rpcmem_alloc` in the phone's libcdsprpc.so) and
// keeps note of it, so that a graph finds its file descriptor when it runs for the first time.
class SharedMemory final : public Allocator {
public:
    // `session` is one of a QNN provider with `enable_htp_shared_memory_allocator`, and stays open as long as this.
    // Throws Ort::Exception if the provider has no such memory.
    explicit SharedMemory(std::shared_ptr<Ort::Session> session);

    // What tensors in this memory are made with.
    static Ort::MemoryInfo info();

    void* allocate(std::size_t num_bytes) override;
    void free(void* data) noexcept override;

private:
    std::shared_ptr<Ort::Session> session_;
    Ort::Allocator allocator_;
};

}  // namespace meki
