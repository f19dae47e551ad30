// Every element of new keys and values lands in its slot, and nothing else changes.

#include "kv_cache.h"

#include <vector>

#include "check.h"

int main() {
    constexpr std::size_t heads = 2, dim = 3, context = 7, num_tokens = 4;
    meki::GraphSpec spec{};
    spec.num_hidden_layers = 2;
    spec.num_key_value_heads = heads;
    spec.head_dim = dim;
    spec.context_length = context;
    for (std::size_t position = 0; position < context; ++position) {
        for (std::size_t count = 1; count <= num_tokens && position + count <= context; ++count) {
            meki::KvCache cache(spec);
            std::vector<float> key(heads * dim * num_tokens), value(heads * num_tokens * dim);
            const auto element = [](std::size_t head, std::size_t token, std::size_t d) {
                return static_cast<float>(1 + d + 10 * token + 100 * head);
            };
            for (std::size_t head = 0; head < heads; ++head) {
                for (std::size_t token = 0; token < num_tokens; ++token) {
                    for (std::size_t d = 0; d < dim; ++d) {
                        key[(head * dim + d) * num_tokens + token] = element(head, token, d);
                        value[(head * num_tokens + token) * dim + d] = -element(head, token, d);
                    }
                }
            }
            cache.write(1, key.data(), value.data(), num_tokens, count, position);
            for (std::size_t head = 0; head < heads; ++head) {
                for (std::size_t slot = 0; slot < context; ++slot) {
                    const bool written = slot >= position && slot < position + count;
                    for (std::size_t d = 0; d < dim; ++d) {
                        const float expected = written ? element(head, slot - position, d) : 0.0f;
                        CHECK(cache.keys(1)[(head * dim + d) * context + slot] == expected);
                        CHECK(cache.values(1)[(head * context + slot) * dim + d] == -expected);
                        CHECK(cache.keys(0)[(head * dim + d) * context + slot] == 0.0f);
                    }
                }
            }
            cache.clear();
            for (std::size_t i = 0; i < heads * dim * context; ++i) {
                CHECK(cache.keys(1)[i] == 0.0f && cache.values(1)[i] == 0.0f);
            }
        }
    }
}
