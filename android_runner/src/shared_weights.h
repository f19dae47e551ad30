// The weights of several graphs, in memory once.
//
// ONNX Runtime keeps matrices in a packed form of its own, a copy for each session. Sessions that get
// their weights from here share both the map of the weight files and the packed copies.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "file_map.h"
#include "ort_api.h"

namespace meki {

class SharedWeights {
public:
    // Gives the external weights of the ONNX file at `path` to a session's `options`. This object must
    // outlive the session.
    void add_to(Ort::SessionOptions& options, const std::string& path);

    Ort::PrepackedWeightsContainer& packed() { return packed_; }

    // Lets go of the mapped pages: once a session has packed its matrices it reads few of them again.
    void release_pages() const;

private:
    std::map<std::string, std::unique_ptr<FileMap>> files_;
    std::map<std::string, Ort::Value> weights_;
    Ort::PrepackedWeightsContainer packed_;
};

}  // namespace meki
