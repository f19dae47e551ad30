#include "backend_ort.h"

#include "ort_graph.h"

namespace meki {

OrtCpuBackend::OrtCpuBackend(int threads) : env_(make_env(threads)) {}

std::unique_ptr<Graph> OrtCpuBackend::load(const std::string& bundle, const PartFile& part) {
    const std::string path = bundle + "/" + part.file;
    auto session = translated(path, [&] {
        Ort::SessionOptions options;
        options.SetGraphOptimizationLevel(ORT_ENABLE_ALL);
        options.DisablePerSessionThreads();
        weights_.add_to(options, path);
        return std::make_shared<Ort::Session>(env_, path.c_str(), options, weights_.packed());
    });
    auto graph = make_graph(path, std::move(session), host_memory());
    weights_.release_pages();
    return graph;
}

}  // namespace meki
