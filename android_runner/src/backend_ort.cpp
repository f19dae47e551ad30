#include "backend_ort.h"

#include "error.h"

namespace meki {

namespace {

// Ort::Exception, as one of our errors about the graph at `path`.
template <typename Call>
auto translated(const std::string& path, Call call) {
    try {
        return call();
    } catch (const Ort::Exception& error) {
        throw Error(std::string("ONNX Runtime: ") + error.what(), path,
                    "check that the bundle is complete, or make it again with `meki-edge pack`");
    }
}

Ort::Env make_env(int threads) {
    Ort::ThreadingOptions options;
    options.SetGlobalIntraOpNumThreads(threads);
    options.SetGlobalInterOpNumThreads(1);
    return {options, ORT_LOGGING_LEVEL_ERROR, "meki-runner"};
}

Ort::SessionOptions session_options(SharedWeights& weights, const std::string& path) {
    Ort::SessionOptions options;
    options.SetGraphOptimizationLevel(ORT_ENABLE_ALL);
    options.DisablePerSessionThreads();
    weights.add_to(options, path);
    return options;
}

class OrtGraph final : public Graph {
public:
    OrtGraph(const Ort::Env& env, SharedWeights& weights, const std::string& path)
        : path_(path),
          memory_(Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault)),
          session_(env, path.c_str(), session_options(weights, path), weights.packed()),
          binding_(session_) {}

    void bind_input(const TensorSpec& tensor, float* data) override {
        translated(path_, [&] { binding_.BindInput(tensor.name.c_str(), wrap(tensor, data)); });
    }

    void bind_output(const TensorSpec& tensor, float* data) override {
        translated(path_, [&] { binding_.BindOutput(tensor.name.c_str(), wrap(tensor, data)); });
    }

    void run() override {
        translated(path_, [&] { session_.Run(run_options_, binding_); });
    }

private:
    // A tensor over the caller's memory; the binding keeps it.
    Ort::Value wrap(const TensorSpec& tensor, float* data) const {
        return Ort::Value::CreateTensor<float>(memory_, data, tensor.num_elements(), tensor.shape.data(),
                                               tensor.shape.size());
    }

    std::string path_;
    Ort::MemoryInfo memory_;
    Ort::Session session_;
    Ort::IoBinding binding_;
    Ort::RunOptions run_options_;
};

}  // namespace

OrtCpuBackend::OrtCpuBackend(int threads) : env_(make_env(threads)) {}

std::unique_ptr<Graph> OrtCpuBackend::load(const std::string& path) {
    auto graph = translated(path, [&] { return std::make_unique<OrtGraph>(env_, weights_, path); });
    weights_.release_pages();
    return graph;
}

}  // namespace meki
