// A part of a graph as a session of ONNX Runtime, whatever provider runs it.
#pragma once

#include <memory>
#include <string>

#include "backend.h"
#include "error.h"
#include "ort_api.h"

namespace meki {

// Ort::Exception, as one of our errors about the file at `path`.
template <typename Call>
auto translated(const std::string& path, Call call,
                const char* fix = "check that the bundle is complete, or make it again with `meki-edge pack`") {
    try {
        return call();
    } catch (const Ort::Exception& error) {
        throw Error(std::string("ONNX Runtime: ") + error.what(), path, fix);
    }
}

// `threads` threads for all sessions together, the caller's included.
Ort::Env make_env(int threads);

// `path` is the graph's file, for errors; `memory` is the kind that its inputs and outputs are bound to.
std::unique_ptr<Graph> make_graph(const std::string& path, std::shared_ptr<Ort::Session> session,
                                  Ort::MemoryInfo memory);

}  // namespace meki
