// The last inputs that memories keep (a causal convolution's past): one buffer a state, bound to the
// prefill and the decode graph alike. Oldest first; zeros before the text begins.
#pragma once

#include <cstddef>
#include <vector>

#include "buffer.h"
#include "graph_spec.h"

namespace meki {

class MemoryStates {
public:
    explicit MemoryStates(const GraphSpec& spec);

    float* state(std::size_t index) { return states_[index].data(); }  // [length, dim]

    // Appends the first `count` inputs of `present` [T, dim] to a state and drops as many of its oldest.
    void shift(std::size_t index, const float* present, std::size_t count);

    void clear();

private:
    std::vector<StateShape> shapes_;
    std::vector<Buffer<float>> states_;
};

}  // namespace meki
