#include "backend_qnn.h"

#include <dlfcn.h>

#include <cassert>
#include <cstdlib>
#include <memory>
#include <mutex>
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
constexpr const char* rpcmem_library = "libcdsprpc.so";
constexpr const char* fix_shared =
    "check that the bundle is complete; if it is the memory that cannot be shared, run with --npu-memory copied";
constexpr const char* fix_provider =
    "name this platform's libonnxruntime_providers_qnn.so with --qnn-provider, or leave it out for an ONNX Runtime "
    "with QNN built in";

void* open_library(const std::string& library) { return ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL); }

std::string loader_error() {
    const char* const reason = ::dlerror();
    return reason != nullptr ? reason : "unknown reason";
}

// Whether memory is shared. The library stays open: the provider opens it by the same name, and needs these of it.
bool can_share(NpuMemory memory) {
    if (memory == NpuMemory::copied) {
        return false;
    }
    void* const library = open_library(rpcmem_library);
    const auto has = [library](const char* function) { return ::dlsym(library, function) != nullptr; };
    if (library != nullptr && has("rpcmem_alloc") && has("rpcmem_free") && has("rpcmem_to_fd") &&
        has("remote_register_buf_attr2")) {
        return true;
    }
    if (memory == NpuMemory::shared) {
        throw Error("no memory can be shared with the NPU: " + loader_error(), rpcmem_library,
                    "only phones have this library, and an app names it with <uses-native-library> in its manifest; or "
                    "run with --npu-memory copied");
    }
    return false;
}

#if ORT_API_VERSION >= 22
std::vector<Ort::ConstEpDevice> find_devices(const Ort::Env& env) {
    std::vector<Ort::ConstEpDevice> devices;
    for (const Ort::ConstEpDevice& device : env.GetEpDevices()) {
        if (std::string(device.EpName()) == provider_name) {
            devices.push_back(device);
        }
    }
    return devices;
}

// ONNX Runtime's environment is one for all backends of the process while any of them lives, and keeps a provider that
// was registered.
void register_provider(Ort::Env& env, const std::string& library) {
    static std::mutex mutex;
    static std::string registered;
    const std::lock_guard lock(mutex);
    // ONNX Runtime takes a relative path for one beside its own library.
    const std::unique_ptr<char, decltype(&std::free)> found(::realpath(library.c_str(), nullptr), std::free);
    const std::string absolute = found ? found.get() : library;
    if (find_devices(env).empty()) {
        env.RegisterExecutionProviderLibrary(provider_name, absolute);
        if (find_devices(env).empty()) {
            env.UnregisterExecutionProviderLibrary(provider_name);
            throw Error("the provider finds no device to run on", library, fix_provider);
        }
        registered = absolute;
    } else if (registered != absolute) {
        throw Error("this process uses another QNN provider already: " + registered, library,
                    "give every runner the same --qnn-provider");
    }
}
#endif

// Where `meki-edge pack` puts what was compiled of a part, without the end of the name: `_ctx.onnx`, the wrapper, which
// names the binary beside it. That is `_qnn.bin`, unless graphs share one.
std::string compiled_path(const std::string& bundle, const PartFile& part) {
    return bundle + "/npu/" + part.file.substr(0, part.file.rfind(".onnx"));
}

bool can_read(const std::string& path) { return ::access(path.c_str(), R_OK) == 0; }

// Qualcomm's simulator crashes on a binary that graphs share.
void require_simulable([[maybe_unused]] const std::string& compiled) {
#if defined(__x86_64__)
    if (!can_read(compiled + "_qnn.bin")) {
        throw Error("graphs share this binary, which the NPU's simulator cannot load", compiled + "_ctx.onnx",
                    "compile with --no-share-weights, and pack again");
    }
#endif
}

}  // namespace

OrtQnnBackend::OrtQnnBackend(const QnnConfig& config)
    : config_(config), shares_memory_(can_share(config.memory)), env_(make_env(threads)) {
    // ONNX Runtime would only say that the graph's nodes are left to the CPU.
    if (open_library(config_.library) == nullptr) {
        throw Error("cannot load the QNN library: " + loader_error(), config_.library,
                    "name this platform's libQnnHtp.so with --qnn-library");
    }
    if (config_.provider.empty()) {
        return;
    }
#if ORT_API_VERSION >= 22
    if (ort_api() >= plugin_api) {
        translated(config_.provider, [&] { register_provider(env_, config_.provider); }, fix_provider);
        return;
    }
#endif
    throw Error("plug-in providers need ONNX Runtime 1." + std::to_string(plugin_api) + ", library and headers",
                config_.provider, "use a newer ONNX Runtime, or one with the QNN provider built in");
}

std::unique_ptr<Graph> OrtQnnBackend::load(const std::string& bundle, const PartFile& part) {
    const std::string path = compiled_path(bundle, part) + "_ctx.onnx";
    if (!can_read(path)) {
        throw Error("the bundle has no NPU binary of " + part.file, path,
                    "run `meki-edge compile`, and pack with --compiled");
    }
    require_simulable(compiled_path(bundle, part));
    const Ort::SessionOptions options = session_options();
    const auto open = [&] { return std::make_shared<Ort::Session>(env_, path.c_str(), options); };
    if (!shares_memory_) {
        return make_graph(path, translated(path, open), host_memory());
    }
    std::shared_ptr<Ort::Session> session = translated(path, open, fix_shared);
    if (!shared_memory_) {
        translated(path, [&] { shared_memory_.emplace(session); }, fix_shared);
    }
    return make_graph(path, std::move(session), SharedMemory::info(), fix_shared);
}

Allocator& OrtQnnBackend::allocator() {
    if (!shares_memory_) {
        return host_allocator();
    }
    assert(shared_memory_);  // it comes with the first graph
    return *shared_memory_;
}

Ort::SessionOptions OrtQnnBackend::session_options() {
    const auto make = [&] {
        Ort::SessionOptions options;
        options.DisablePerSessionThreads();
        options.AddConfigEntry("session.disable_cpu_ep_fallback", "1");
        // Where several graphs are in one binary, it is loaded once.
        options.AddConfigEntry("ep.share_ep_contexts", "1");
        const std::unordered_map<std::string, std::string> provider = {
            {"backend_path", config_.library},
            {"htp_performance_mode", "burst"},
            {"enable_htp_shared_memory_allocator", shares_memory_ ? "1" : "0"}};
        if (config_.provider.empty()) {
            options.AppendExecutionProvider("QNN", provider);
            return options;
        }
#if ORT_API_VERSION >= 22
        options.AppendExecutionProvider_V2(env_, find_devices(env_), provider);
#endif
        return options;
    };
    return translated(config_.provider.empty() ? "--ort-library" : config_.provider, make, fix_provider);
}

}  // namespace meki
