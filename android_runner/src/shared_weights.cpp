#include "shared_weights.h"

#include <utility>

#include "error.h"
#include "onnx_weights.h"

namespace meki {

namespace {

constexpr std::uint64_t max_graph_bytes = std::uint64_t{1} << 31;  // protobuf's own limit
constexpr const char* fix = "make the bundle again with `meki-edge pack`";

}  // namespace

void SharedWeights::add_to(Ort::SessionOptions& options, const std::string& path) {
    const std::string directory = path.substr(0, path.rfind('/') + 1);
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    for (const ExternalWeight& weight : external_weights(File(path).read_text(max_graph_bytes), path)) {
        if (!is_file_name(weight.location)) {
            throw Error("the weight '" + weight.name + "' lies in '" + weight.location +
                            "', which is not the name of a file in the bundle's directory",
                        path, fix);
        }
        const std::string file = directory + weight.location;
        std::unique_ptr<FileMap>& map = files_[file];
        if (!map) {
            map = std::make_unique<FileMap>(File(file));
        }
        if (weight.offset > map->size() || weight.length > map->size() - weight.offset) {
            throw Error("the weight '" + weight.name + "' of " + path + " ends past the " +
                            std::to_string(map->size()) + " bytes of the file",
                        file, fix);
        }
        const std::string key = file + "/" + std::to_string(weight.offset) + "/" + weight.name;
        auto found = weights_.find(key);
        if (found == weights_.end()) {
            // ONNX Runtime does not write to initializers.
            void* data = const_cast<std::uint8_t*>(map->data() + weight.offset);
            auto value = Ort::Value::CreateTensor(memory, data, static_cast<std::size_t>(weight.length),
                                                  weight.shape.data(), weight.shape.size(),
                                                  static_cast<ONNXTensorElementDataType>(weight.data_type));
            found = weights_.emplace(key, std::move(value)).first;
        }
        options.AddInitializer(weight.name.c_str(), found->second);
    }
}

void SharedWeights::release_pages() const {
    for (const auto& [path, map] : files_) {
        map->release();
    }
}

}  // namespace meki
