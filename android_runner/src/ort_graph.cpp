#include "ort_graph.h"

#include <utility>

namespace meki {

namespace {

ONNXTensorElementDataType element_type(DType dtype) {
    switch (dtype) {
        case DType::float32:
            return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        case DType::float16:
            return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
        case DType::uint8:
            return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
        case DType::int8:
            return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
        case DType::uint16:
            return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16;
        case DType::int16:
            return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16;
    }
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
}

class OrtGraph final : public Graph {
public:
    OrtGraph(std::string path, std::shared_ptr<Ort::Session> session, Ort::MemoryInfo memory, const char* fix)
        : path_(std::move(path)),
          fix_(fix),
          memory_(std::move(memory)),
          session_(std::move(session)),
          binding_(*session_) {}

    void bind_input(const TensorSpec& tensor, void* data) override {
        translated(path_, [&] { binding_.BindInput(tensor.name.c_str(), wrap(tensor, data)); });
    }

    void bind_output(const TensorSpec& tensor, void* data) override {
        translated(path_, [&] { binding_.BindOutput(tensor.name.c_str(), wrap(tensor, data)); });
    }

    void run() override {
        translated(
            path_, [&] { session_->Run(run_options_, binding_); }, fix_);
    }

private:
    // A tensor over the caller's memory; the binding keeps it.
    Ort::Value wrap(const TensorSpec& tensor, void* data) const {
        return Ort::Value::CreateTensor(memory_, data, tensor.num_elements() * tensor.type.size(), tensor.shape.data(),
                                        tensor.shape.size(), element_type(tensor.type.dtype));
    }

    std::string path_;
    const char* fix_;
    Ort::MemoryInfo memory_;
    std::shared_ptr<Ort::Session> session_;
    Ort::IoBinding binding_;
    Ort::RunOptions run_options_;
};

}  // namespace

Ort::Env make_env(int threads) {
    const auto make = [threads] {
        Ort::ThreadingOptions options;
        options.SetGlobalIntraOpNumThreads(threads);
        options.SetGlobalInterOpNumThreads(1);
        return Ort::Env(options, ORT_LOGGING_LEVEL_ERROR, "meki-runner");
    };
    return translated("this process", make, "raise its limits on threads and memory, or ask for fewer threads");
}

Ort::MemoryInfo host_memory() { return Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault); }

std::unique_ptr<Graph> make_graph(const std::string& path, std::shared_ptr<Ort::Session> session,
                                  Ort::MemoryInfo memory, const char* fix) {
    return translated(path, [&] {
        return std::make_unique<OrtGraph>(path, std::move(session), std::move(memory), fix);
    });
}

}  // namespace meki
