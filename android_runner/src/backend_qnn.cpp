#include "backend_qnn.h"

#include <dlfcn.h>
#include <string>
#include <unistd.h>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ort_graph.h"

namespace meki {

namespace {

constexpr const char* provider_name = "QNNExecutionProvider";
constexpr std::uint32_t plugin_api = 22;  // the first with plug-in providers
constexpr int threads = 1;                // no node may run on the CPU
constexpr const char* fix_provider =
    "name this platform's libonnxruntime_providers_qnn.so with --qnn-provider, or leave it out for an ONNX Runtime "
    "with QNN built in";

// Where `meki-edge pack` puts a part's wrapper, which names the binary beside it.
std::string wrapper_path(const std::string& bundle, const PartFile& part) {
    return bundle + "/npu/" + part.file.substr(0, part.file.rfind(".onnx")) + "_ctx.onnx";
}

}  // namespace

OrtQnnBackend::OrtQnnBackend(const QnnLibraries& libraries) : libraries_(libraries), env_(make_env(threads)) {
    // ONNX Runtime would only say that the graph's nodes are left to the CPU.
    if (::dlopen(libraries_.backend.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
        const char* reason = ::dlerror();
        throw Error(std::string("cannot load the QNN library: ") + (reason != nullptr ? reason : "unknown reason"),
                    libraries_.backend, "name this platform's libQnnHtp.so with --qnn-library");
    }
    if (libraries_.provider.empty()) {
        return;
    }
#if ORT_API_VERSION >= 22
    if (ort_api() >= plugin_api) {
        translated(
            libraries_.provider,
            [&] { env_.RegisterExecutionProviderLibrary(provider_name, libraries_.provider); }, fix_provider);
        return;
    }
#endif
    throw Error("plug-in providers need ONNX Runtime 1." + std::to_string(plugin_api) + ", library and headers",
                libraries_.provider, "use a newer ONNX Runtime, or one with the QNN provider built in");
}

std::unique_ptr<Graph> OrtQnnBackend::load(const std::string& bundle, const PartFile& part) {
    const std::string path = wrapper_path(bundle, part);
    if (::access(path.c_str(), R_OK) != 0) {
        throw Error("the bundle has no NPU binary of " + part.file, path,
                    "run `meki-edge compile`, and pack with --compiled");
    }
    const Ort::SessionOptions options = session_options();
    return make_graph(path, translated(path, [&] { return Ort::Session(env_, path.c_str(), options); }));
}

Ort::SessionOptions OrtQnnBackend::session_options() {
    const auto make = [&] {
        Ort::SessionOptions options;
        options.DisablePerSessionThreads();
        options.AddConfigEntry("session.disable_cpu_ep_fallback", "1");
        // Where several graphs are in one binary, it is loaded once.
        options.AddConfigEntry("ep.share_ep_contexts", "1");
        const std::unordered_map<std::string, std::string> provider = {{"backend_path", libraries_.backend},
                                                                       {"htp_performance_mode", "burst"}};
        if (libraries_.provider.empty()) {
            options.AppendExecutionProvider("QNN", provider);
            return options;
        }
#if ORT_API_VERSION >= 22
        std::vector<Ort::ConstEpDevice> devices;
        for (const Ort::ConstEpDevice& device : env_.GetEpDevices()) {
            if (std::string(device.EpName()) == provider_name) {
                devices.push_back(device);
            }
        }
        if (devices.empty()) {
            throw Error("the provider finds no device to run on", libraries_.provider, fix_provider);
        }
        options.AppendExecutionProvider_V2(env_, devices, provider);
#endif
        return options;
    };
    return translated(libraries_.provider.empty() ? "--ort-library" : libraries_.provider, make, fix_provider);
}

}  // namespace meki
