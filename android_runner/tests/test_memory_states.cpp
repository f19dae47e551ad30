// A state holds the last inputs of all that were appended, in chunks of any size, padded or not.

#include "memory_states.h"

#include <vector>

#include "check.h"
#include "half.h"

namespace {

constexpr std::size_t dim = 3, num_tokens = 5;

// `T` holds an element of `type`, and `element` is one that is not zero.
template <typename T>
void appended(const meki::ElementType& type, T zero, T (*element)(int)) {
    for (const std::size_t length : {1u, 2u, 4u, 5u, 9u}) {
        meki::GraphSpec spec{};
        spec.memory_states = {{2, 2, {}}, {length, dim, type}};
        meki::MemoryStates states(spec, meki::host_allocator());
        const T* state = static_cast<const T*>(states.state(1));
        std::vector<T> history(length * dim, zero);
        int next = 1;
        for (const std::size_t count : {1u, 1u, 3u, 5u, 2u, 1u, 4u, 5u, 5u, 1u}) {
            std::vector<T> present(num_tokens * dim, element(250));  // what padding tokens left is not kept
            for (std::size_t i = 0; i < count * dim; ++i) {
                present[i] = element(next++);
                history.push_back(present[i]);
            }
            states.shift(1, present.data(), count);
            for (std::size_t i = 0; i < length * dim; ++i) {
                CHECK(state[i] == history[history.size() - length * dim + i]);
            }
        }
        states.clear();
        for (std::size_t i = 0; i < length * dim; ++i) {
            CHECK(state[i] == zero);
        }
        CHECK(static_cast<const float*>(states.state(0))[3] == 0.0f);
    }
}

}  // namespace

int main() {
    appended<float>({}, 0.0f, [](int i) { return static_cast<float>(i); });
    appended<std::uint16_t>({meki::DType::float16, {}}, 0,
                            [](int i) { return meki::float_to_half(static_cast<float>(i)); });
    appended<std::uint8_t>({meki::DType::uint8, meki::Quantization{0.1f, 200}}, 200,
                           [](int i) { return static_cast<std::uint8_t>(i); });
}
