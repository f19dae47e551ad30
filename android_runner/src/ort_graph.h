// A part of a graph as a session of ONNX Runtime, whatever provider runs it.
#pragma once

#include <memory>
#include <string>

#include "backend.h"
#include "error.h"
#include "ort_api.h"

namespace meki {

constexpr const char* fix_bundle = "check that the bundle is complete, or make it again with `meki-edge pack`";

// Ort::Exception, as one of our errors about the file at `path`.
template <typename Call>
auto translated(const std::string& path, Call call, const char* fix = fix_bundle) {
    try {
        return call();
    } catch (const Ort::Exception& error) {
        throw Error(std::string("ONNX Runtime: ") + error.what(), path, fix);
    }
}

// `threads` threads for all sessions together, the caller's included.
Ort::Env make_env(int threads);

// What tensors in the host's memory are made with.
Ort::MemoryInfo host_memory();

// `memory` is the kind that its inputs and outputs are bound to. `path`, the graph's file, and `fix` are for errors.
std::unique_ptr<Graph> make_graph(const std::string& path, std::shared_ptr<Ort::Session> session,
                                  Ort::MemoryInfo memory, const char* fix = fix_bundle);

}  // namespace meki
