// The container of a ROM file: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "file.h"

namespace meki {

class JsonObject;

class Safetensors {
public:
    // A tensor of the header; its bytes begin and end at these bytes of the file.
    struct Tensor {
        std::string dtype;
        std::vector<std::uint64_t> shape;
        std::uint64_t begin;
        std::uint64_t end;
    };

    // Throws Error if `path` is not such a file, if a tensor is not U8, I32, U32 or I64, does not fit its byte
    // range or the file, or if the file does not end with the last one.
    explicit Safetensors(const std::string& path);

    const File& file() const { return file_; }
    bool has(const char* key) const { return metadata_.count(key) != 0; }
    // A value of the metadata, or nothing.
    std::string text(const char* key) const;
    const std::map<std::string, Tensor>& tensors() const { return tensors_; }
    // These throw Error if there is no such tensor.
    const Tensor& tensor(const std::string& name) const;
    const Tensor& list(const char* name, const char* dtype) const;  // and unless it is that, of one axis

    // All elements of a tensor. Throws Error if the file ended meanwhile, or the storage fails.
    template <typename T>
    std::vector<T> read(const Tensor& tensor) const {
        std::vector<T> elements(static_cast<std::size_t>(tensor.end - tensor.begin) / sizeof(T));
        read_bytes(tensor, elements.data());
        return elements;
    }

    // Throws Error about this file.
    [[noreturn]] void fail(const std::string& what) const;
    static const char* fix();

private:
    void parse(const std::string& header, std::uint64_t header_end);
    Tensor parse_tensor(const std::string& name, const JsonObject& object, std::uint64_t header_end) const;
    void read_bytes(const Tensor& tensor, void* out) const;

    File file_;
    std::map<std::string, std::string> metadata_;
    std::map<std::string, Tensor> tensors_;
};

}  // namespace meki
