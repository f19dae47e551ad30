// Where an ONNX file keeps the weights that lie outside it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace meki {

// An initializer whose data lie in another file.
struct ExternalWeight {
    std::string name;
    std::int32_t data_type = 0;  // onnx.TensorProto.DataType
    std::vector<std::int64_t> shape;
    std::string location;  // file name, relative to the ONNX file
    std::uint64_t offset = 0;
    std::uint64_t length = 0;  // bytes
};

// The external initializers of `model`, the bytes of an ONNX file. Reads only as much of protobuf's
// wire format as that takes. Throws Error naming `where` if the bytes are not well-formed.
std::vector<ExternalWeight> external_weights(const std::string& model, const std::string& where);

}  // namespace meki
