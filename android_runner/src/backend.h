// What runs a graph: ONNX Runtime on the CPU here, an NPU's provider on a phone.
#pragma once

#include <memory>
#include <string>

#include "allocator.h"
#include "graph_spec.h"

namespace meki {

// A loaded part of a graph. Its inputs and outputs stay bound to the caller's memory from run to run, so that a
// step neither copies nor allocates tensors.
class Graph {
public:
    virtual ~Graph() = default;

    // Binds an input or output to `data` from the backend's allocator, which must hold its elements, in its type, and
    // outlive the graph's runs.
    virtual void bind_input(const TensorSpec& tensor, void* data) = 0;
    virtual void bind_output(const TensorSpec& tensor, void* data) = 0;
    virtual void run() = 0;
};

class Backend {
public:
    virtual ~Backend() = default;

    virtual std::string name() const = 0;
    // A part of one of the graphs of a bundle directory. Throws Error if it cannot be loaded.
    virtual std::unique_ptr<Graph> load(const std::string& bundle, const PartFile& part) = 0;

    // Where the inputs and outputs of its graphs lie. Call it when a graph was loaded. What it gives must not outlive
    // the backend.
    virtual Allocator& allocator() = 0;
    // What that means to the graphs: "host", memory that they work on; "shared" with the device that they run on; or
    // "copied" to and from the device in each run.
    virtual const char* tensor_memory() const = 0;
    // Whether memory that several graphs are bound to must first be used by the one that takes the most of it.
    virtual bool largest_first() const { return false; }
};

}  // namespace meki
