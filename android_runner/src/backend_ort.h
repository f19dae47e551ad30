// ONNX Runtime's CPU provider.
#pragma once

#include "backend.h"
#include "ort_api.h"
#include "shared_weights.h"

namespace meki {

class OrtCpuBackend final : public Backend {
public:
    // `load_ort` comes first. The graphs share one pool of `threads` threads, the caller's included, and
    // their weights; they must not outlive the backend.
    explicit OrtCpuBackend(int threads);

    std::string name() const override { return "cpu"; }
    std::unique_ptr<Graph> load(const std::string& bundle, const PartFile& part) override;
    Allocator& allocator() override { return host_allocator(); }
    const char* tensor_memory() const override { return "host"; }

private:
    Ort::Env env_;
    SharedWeights weights_;
};

}  // namespace meki
