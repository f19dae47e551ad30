// The last inputs that memories keep (a causal convolution's past): one buffer a state, in the graphs' own
// type and bound to all of them alike. Oldest first; zeros before the text begins.
#pragma once

#include <cstddef>
#include <vector>

#include "element_type.h"
#include "graph_spec.h"

namespace meki {

class MemoryStates {
public:
    // `allocator` must outlive it.
    MemoryStates(const GraphSpec& spec, Allocator& allocator);

    void* state(std::size_t index) { return states_[index].data(); }  // [length, dim]

    // Appends the first `count` inputs of `present` [T, dim], of the state's type, and drops as many of its oldest.
    void shift(std::size_t index, const void* present, std::size_t count);

    void clear();

private:
    std::vector<StateShape> shapes_;
    std::vector<TensorData> states_;
};

}  // namespace meki
