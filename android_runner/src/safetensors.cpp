#include "safetensors.h"

#include <algorithm>

#include "error.h"
#include "strict_json.h"

namespace meki {

namespace {

constexpr std::uint64_t max_header_bytes = 100'000'000;  // the safetensors library's own limit
constexpr const char* metadata_key = "__metadata__";

// Bytes of an element of the dtypes that a ROM file may hold; 0 for all others.
std::uint64_t element_bytes(const std::string& dtype) {
    if (dtype == "U8") {
        return 1;
    }
    return dtype == "I32" || dtype == "U32" ? 4 : dtype == "I64" ? 8 : 0;
}

}  // namespace

Safetensors::Safetensors(const std::string& path) : file_(path) {
    std::uint64_t header_bytes = 0;
    if (read_at(file_.descriptor(), &header_bytes, sizeof header_bytes, 0, path) < sizeof header_bytes) {
        fail("not a safetensors file: " + std::to_string(file_.size()) + " bytes is too short for a header");
    }
    if (header_bytes > std::min(max_header_bytes, file_.size() - sizeof header_bytes)) {
        fail("the header claims " + std::to_string(header_bytes) + " bytes but the file has " +
             std::to_string(file_.size()));
    }
    std::string header(static_cast<std::size_t>(header_bytes), '\0');
    if (read_at(file_.descriptor(), header.data(), header.size(), sizeof header_bytes, path) < header.size()) {
        fail("the file ends inside the header");
    }
    parse(header, sizeof header_bytes + header_bytes);
}

void Safetensors::parse(const std::string& header, std::uint64_t header_end) {
    if (header.empty() || header.front() != '{') {
        fail("not a safetensors file: the header does not begin with '{'");
    }
    const Json parsed = parse_json(header, file_.path(), fix());
    const JsonObject root(parsed, file_.path(), fix());
    if (root.has(metadata_key)) {
        const JsonObject metadata = root.object(metadata_key);
        for (const auto& [key, unused] : root.at(metadata_key).items()) {
            metadata_.emplace(key, metadata.text(key.c_str()));
        }
    }
    std::uint64_t end = header_end;
    for (const auto& [name, unused] : parsed.items()) {
        if (name != metadata_key) {
            const Tensor& tensor =
                tensors_.emplace(name, parse_tensor(name, root.object(name.c_str()), header_end)).first->second;
            end = std::max(end, tensor.end);
        }
    }
    if (end != file_.size()) {
        fail("the tensors end at byte " + std::to_string(end) + " but the file has " + std::to_string(file_.size()));
    }
}

Safetensors::Tensor Safetensors::parse_tensor(const std::string& name, const JsonObject& object,
                                              std::uint64_t header_end) const {
    const auto sizes = [&](const char* key) {
        std::vector<std::uint64_t> parsed;
        for (const Json& value : object.list(key)) {
            if (!value.is_number_unsigned()) {
                fail("the tensor '" + name + "' has " + key + " " + object.list(key).dump() + ", not sizes");
            }
            parsed.push_back(value.get<std::uint64_t>());
        }
        return parsed;
    };
    Tensor tensor{object.text("dtype"), sizes("shape"), 0, 0};
    std::uint64_t num_bytes = element_bytes(tensor.dtype);
    if (num_bytes == 0) {
        fail("the tensor '" + name + "' is " + tensor.dtype + ", which no ROM file has");
    }
    const std::vector<std::uint64_t> offsets = sizes("data_offsets");
    bool fits = offsets.size() == 2 && offsets[0] <= offsets[1];
    for (const std::uint64_t size : tensor.shape) {
        fits = fits && (num_bytes == 0 || size <= UINT64_MAX / num_bytes);
        num_bytes *= size;
    }
    if (!fits || offsets[1] - offsets[0] != num_bytes) {
        fail("the tensor '" + name + "' of shape " + object.list("shape").dump() + " does not fit its byte range " +
             object.list("data_offsets").dump());
    }
    if (offsets[1] > file_.size() - header_end) {
        fail("the tensor '" + name + "' ends at byte " + std::to_string(offsets[1]) +
             " of the data but the file holds " + std::to_string(file_.size() - header_end));
    }
    tensor.begin = header_end + offsets[0];
    tensor.end = header_end + offsets[1];
    return tensor;
}

std::string Safetensors::text(const char* key) const {
    const auto found = metadata_.find(key);
    return found == metadata_.end() ? "" : found->second;
}

const Safetensors::Tensor& Safetensors::tensor(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) {
        fail("the tensor '" + name + "' is missing");
    }
    return found->second;
}

const Safetensors::Tensor& Safetensors::list(const char* name, const char* dtype) const {
    const Tensor& found = tensor(name);
    if (found.dtype != dtype || found.shape.size() != 1) {
        fail(std::string("the tensor '") + name + "' is " + found.dtype + " of shape " + Json(found.shape).dump() +
             ", not " + dtype + " of one axis");
    }
    return found;
}

void Safetensors::read_bytes(const Tensor& tensor, void* out) const {
    const auto num_bytes = static_cast<std::size_t>(tensor.end - tensor.begin);
    if (read_at(file_.descriptor(), out, num_bytes, tensor.begin, file_.path()) < num_bytes) {
        fail("the file ends inside a tensor, which begins at byte " + std::to_string(tensor.begin));
    }
}

void Safetensors::fail(const std::string& what) const { throw Error(what, file_.path(), fix()); }

const char* Safetensors::fix() {
    return "copy the file again, or regenerate it with `meki-edge reparam`, `calibrate` or `export`";
}

}  // namespace meki
