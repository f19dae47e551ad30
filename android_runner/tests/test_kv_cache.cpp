// Every element of new keys and values lands in its slot, and nothing else changes.

#include "kv_cache.h"

#include <vector>

#include "check.h"

namespace {

constexpr std::size_t heads = 2, dim = 3, context = 7, num_tokens = 4;

template <typename T>
void written_in_place(const meki::ElementType& type, T zero) {
    meki::GraphSpec spec{};
    spec.num_hidden_layers = 2;
    spec.num_key_value_heads = heads;
    spec.head_dim = dim;
    spec.context_length = context;
    spec.decode.parts.emplace_back();
    for (std::size_t layer = 0; layer < 2; ++layer) {
        for (const char* role : {"past_key", "past_value"}) {
            spec.decode.parts[0].inputs.push_back({role, role, type, {}, layer});
        }
    }
    const auto element = [](std::size_t head, std::size_t token, std::size_t d) {
        return static_cast<T>(1 + d + 10 * token + 100 * head);
    };
    for (std::size_t position = 0; position < context; ++position) {
        for (std::size_t count = 1; count <= num_tokens && position + count <= context; ++count) {
            meki::KvCache cache(spec);
            std::vector<T> key(heads * dim * num_tokens), value(heads * num_tokens * dim);
            for (std::size_t head = 0; head < heads; ++head) {
                for (std::size_t token = 0; token < num_tokens; ++token) {
                    for (std::size_t d = 0; d < dim; ++d) {
                        key[(head * dim + d) * num_tokens + token] = element(head, token, d);
                        value[(head * num_tokens + token) * dim + d] = static_cast<T>(element(head, token, d) + 1);
                    }
                }
            }
            cache.write(1, key.data(), value.data(), num_tokens, count, position);
            const T* keys[] = {static_cast<const T*>(cache.keys(0)), static_cast<const T*>(cache.keys(1))};
            const T* values[] = {static_cast<const T*>(cache.values(0)), static_cast<const T*>(cache.values(1))};
            for (std::size_t head = 0; head < heads; ++head) {
                for (std::size_t slot = 0; slot < context; ++slot) {
                    const bool written = slot >= position && slot < position + count;
                    for (std::size_t d = 0; d < dim; ++d) {
                        const T expected = element(head, slot - position, d);
                        const std::size_t in_keys = (head * dim + d) * context + slot;
                        const std::size_t in_values = (head * context + slot) * dim + d;
                        CHECK(keys[1][in_keys] == (written ? expected : zero));
                        CHECK(values[1][in_values] == (written ? static_cast<T>(expected + 1) : zero));
                        CHECK(keys[0][in_keys] == zero && values[0][in_values] == zero);
                    }
                }
            }
            cache.clear();
            for (std::size_t i = 0; i < heads * dim * context; ++i) {
                CHECK(keys[1][i] == zero && values[1][i] == zero);
            }
        }
    }
}

}  // namespace

int main() {
    written_in_place<float>({}, 0.0f);
    written_in_place<std::uint16_t>({meki::DType::float16, {}}, 0);
    written_in_place<std::uint8_t>({meki::DType::uint8, meki::Quantization{0.25f, 7}}, 7);
}
