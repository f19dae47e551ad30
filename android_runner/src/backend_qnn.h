// ONNX Runtime's QNN provider: the binaries in a bundle's `npu` directory, on the Hexagon NPU.
//
// On a phone that is the NPU itself; on an x86-64 machine with the libraries of the `onnxruntime-qnn` wheel it
// is the NPU's simulator, which says what is computed and nothing about speed.
#pragma once

#include "backend.h"
#include "ort_api.h"

namespace meki {

struct QnnLibraries {
    std::string backend;   // libQnnHtp.so: a path, or a name that the loader finds
    std::string provider;  // libonnxruntime_providers_qnn.so, a plug-in; empty: built into ONNX Runtime
};

class OrtQnnBackend final : public Backend {
public:
    // `load_ort` comes first. The graphs must not outlive the backend. Throws Error if there is no such provider.
    explicit OrtQnnBackend(const QnnLibraries& libraries);

    std::string name() const override { return "qnn"; }
    std::unique_ptr<Graph> load(const std::string& bundle, const PartFile& part) override;

private:
    Ort::SessionOptions session_options();

    QnnLibraries libraries_;
    Ort::Env env_;
};

}  // namespace meki
