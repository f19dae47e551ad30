#include "memory_states.h"

#include <algorithm>
#include <cstring>

namespace meki {

MemoryStates::MemoryStates(const GraphSpec& spec, Allocator& allocator) : shapes_(spec.memory_states) {
    for (const StateShape& shape : shapes_) {
        states_.emplace_back(shape.type, shape.length * shape.dim, allocator);
    }
}

void MemoryStates::shift(std::size_t index, const void* present, std::size_t count) {
    const StateShape& shape = shapes_[index];
    const std::size_t input_bytes = shape.dim * shape.type.size();
    const std::size_t added = std::min(count, shape.length);
    auto* const begin = static_cast<unsigned char*>(state(index));
    const std::size_t kept_bytes = (shape.length - added) * input_bytes;
    std::memmove(begin, begin + added * input_bytes, kept_bytes);
    std::memcpy(begin + kept_bytes, static_cast<const unsigned char*>(present) + (count - added) * input_bytes,
                added * input_bytes);
}

void MemoryStates::clear() {
    for (TensorData& state : states_) {
        state.clear();
    }
}

}  // namespace meki
