#include "memory_states.h"

#include <algorithm>

namespace meki {

MemoryStates::MemoryStates(const GraphSpec& spec) : shapes_(spec.memory_states) {
    for (const StateShape& shape : shapes_) {
        states_.emplace_back(shape.length * shape.dim);
    }
}

void MemoryStates::shift(std::size_t index, const float* present, std::size_t count) {
    const auto [length, dim] = shapes_[index];
    float* const begin = state(index);
    float* const end = begin + length * dim;
    const std::size_t added = std::min(count, length) * dim;
    std::copy(begin + added, end, begin);  // towards the front, so the overlap is harmless
    std::copy_n(present + count * dim - added, added, end - added);
}

void MemoryStates::clear() {
    for (Buffer<float>& state : states_) {
        state.clear();
    }
}

}  // namespace meki
