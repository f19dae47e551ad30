// ONNX Runtime's QNN provider: the binaries in a bundle's `npu` directory, on the Hexagon NPU.
//
// On a phone that is the NPU itself; on an x86-64 machine with the libraries of the `onnxruntime-qnn` wheel it
// is the NPU's simulator, which says what is computed and nothing about speed.
#pragma once

#include <optional>

#include "backend.h"
#include "ort_api.h"
#include "shared_memory.h"

namespace meki {

// How inputs and outputs come to the NPU.
enum class NpuMemory {
    automatic,  // shared where the system has libcdsprpc.so, as phones have
    shared,     // they lie in memory that the NPU sees
    copied      // the provider copies them in each run
};

struct QnnConfig {
    std::string library;   // libQnnHtp.so: a path, or a name that the loader finds
    std::string provider;  // libonnxruntime_providers_qnn.so, a plug-in; empty: built into ONNX Runtime
    NpuMemory memory;
};

class OrtQnnBackend final : public Backend {
public:
    // `load_ort` comes first. The graphs must not outlive the backend. Throws Error if there is no such provider, or
    // memory is to be shared and cannot be.
    explicit OrtQnnBackend(const QnnConfig& config);

    std::string name() const override { return "qnn"; }
    std::unique_ptr<Graph> load(const std::string& bundle, const PartFile& part) override;
    Allocator& allocator() override;
    const char* tensor_memory() const override { return shares_memory_ ? "shared" : "copied"; }
    // The provider tells the NPU of memory once, with the size of the tensor that it then holds.
    bool largest_first() const override { return shares_memory_; }

private:
    Ort::SessionOptions session_options();

    QnnConfig config_;
    bool shares_memory_;
    Ort::Env env_;
    std::optional<SharedMemory> shared_memory_;
};

}  // namespace meki
