#include "ort_api.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>

#include "error.h"

namespace meki {

namespace {

// The API of the oldest headers that the build is meant for (Debian's libonnxruntime-dev).
constexpr std::uint32_t oldest_api = 21;

std::uint32_t api_in_use = 0;

}  // namespace

std::string load_ort(const std::string& library) {
    const char* const fix = "name the libonnxruntime.so of an onnxruntime package with --ort-library";
    void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* reason = ::dlerror();
        throw Error(std::string("cannot load ONNX Runtime: ") + (reason != nullptr ? reason : "unknown reason"),
                    library, fix);
    }
    using GetApiBase = const OrtApiBase* (*)();
    const auto get_api_base = reinterpret_cast<GetApiBase>(::dlsym(handle, "OrtGetApiBase"));
    if (get_api_base == nullptr) {
        throw Error("this library is not ONNX Runtime: it has no OrtGetApiBase", library, fix);
    }
    // "1.29.0" has API 29. An older library than the headers serves too: the table of functions only
    // grows, and this program calls none of the newest unasked.
    const std::string version = get_api_base()->GetVersionString();
    const std::string minor = version.substr(version.find('.') + 1);
    const auto newest = static_cast<std::uint32_t>(std::strtoul(minor.c_str(), nullptr, 10));
    const std::uint32_t api = std::min<std::uint32_t>(ORT_API_VERSION, newest);
    const OrtApi* functions = api >= oldest_api ? get_api_base()->GetApi(api) : nullptr;
    if (functions == nullptr) {
        throw Error("ONNX Runtime " + version + " is too old: version 1." + std::to_string(oldest_api) +
                        " or later is needed",
                    library, fix);
    }
    Ort::InitApi(functions);
    api_in_use = api;
    return version;
}

std::uint32_t ort_api() { return api_in_use; }

}  // namespace meki
