// A state holds the last inputs of all that were appended, in chunks of any size, padded or not.

#include "memory_states.h"

#include <vector>

#include "check.h"

int main() {
    constexpr std::size_t dim = 3, num_tokens = 5;
    for (const std::size_t length : {1u, 2u, 4u, 5u, 9u}) {
        meki::GraphSpec spec{};
        spec.memory_states = {{2, 2}, {length, dim}};
        meki::MemoryStates states(spec);
        std::vector<float> history(length * dim, 0.0f);
        float next = 1;
        for (const std::size_t count : {1u, 1u, 3u, 5u, 2u, 1u, 4u, 5u, 5u, 1u}) {
            std::vector<float> present(num_tokens * dim, -1.0f);  // what padding tokens left is not kept
            for (std::size_t i = 0; i < count * dim; ++i) {
                present[i] = next++;
                history.push_back(present[i]);
            }
            states.shift(1, present.data(), count);
            for (std::size_t i = 0; i < length * dim; ++i) {
                CHECK(states.state(1)[i] == history[history.size() - length * dim + i]);
            }
        }
        states.clear();
        for (std::size_t i = 0; i < length * dim; ++i) {
            CHECK(states.state(1)[i] == 0.0f);
        }
        CHECK(states.state(0)[3] == 0.0f);
    }
}
