// Every element of new keys and values lands in its slot, nothing else changes, and all of it is spread when the
// cache grows.

#include "kv_cache.h"

#include <algorithm>
#include <vector>

#include "check.h"

namespace {

constexpr std::size_t heads = 2, dim = 3, context = 7, num_tokens = 4;

// Two layers, in contexts of these lengths.
meki::GraphSpec spec_of(const meki::ElementType& type, const std::vector<std::size_t>& lengths) {
    meki::GraphSpec spec{};
    spec.num_hidden_layers = 2;
    spec.num_key_value_heads = heads;
    spec.head_dim = dim;
    meki::GraphFile decode{1, {{}}};
    for (std::size_t layer = 0; layer < 2; ++layer) {
        for (const char* role : {"past_key", "past_value"}) {
            decode.parts[0].inputs.push_back({role, role, type, {}, layer});
        }
    }
    for (const std::size_t length : lengths) {
        spec.contexts.push_back({length, {}, decode});
    }
    return spec;
}

template <typename T>
void written_in_place(const meki::ElementType& type, T zero) {
    const meki::GraphSpec spec = spec_of(type, {context});
    const auto element = [](std::size_t head, std::size_t token, std::size_t d) {
        return static_cast<T>(1 + d + 10 * token + 100 * head);
    };
    for (std::size_t position = 0; position < context; ++position) {
        for (std::size_t count = 1; count <= num_tokens && position + count <= context; ++count) {
            meki::KvCache cache(spec, meki::host_allocator());
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

// A cache beside what must be in it.
template <typename T>
class Checked {
public:
    Checked(const meki::ElementType& type, T zero, const std::vector<std::size_t>& lengths)
        : zero_(zero),
          shortest_(lengths.front()),
          slots_(shortest_),
          cache_(spec_of(type, lengths), meki::host_allocator()) {
        for (std::size_t layer = 0; layer < 2; ++layer) {
            addresses_.push_back(cache_.keys(layer));
            addresses_.push_back(cache_.values(layer));
        }
    }

    std::size_t length() const { return tokens_.size(); }

    void grow(std::size_t slots) {
        cache_.grow(slots);
        slots_ = slots;
        check();
    }

    void clear() {
        cache_.clear();
        slots_ = shortest_;
        tokens_.clear();
        check();
    }

    // Writes `count` tokens, as the first of a chunk.
    void write(std::size_t count) {
        std::vector<int> chunk(num_tokens, 0);  // what padding left
        for (std::size_t i = 0; i < count; ++i) {
            chunk[i] = ++last_;
        }
        for (std::size_t layer = 0; layer < 2; ++layer) {
            std::vector<T> key(heads * dim * num_tokens), value(heads * num_tokens * dim);
            for (std::size_t head = 0; head < heads; ++head) {
                for (std::size_t token = 0; token < num_tokens; ++token) {
                    for (std::size_t d = 0; d < dim; ++d) {
                        key[(head * dim + d) * num_tokens + token] = element(chunk[token], 2 * layer, head, d);
                        value[(head * num_tokens + token) * dim + d] = element(chunk[token], 2 * layer + 1, head, d);
                    }
                }
            }
            cache_.write(layer, key.data(), value.data(), num_tokens, count, tokens_.size());
        }
        tokens_.insert(tokens_.end(), chunk.begin(), chunk.begin() + static_cast<std::ptrdiff_t>(count));
        check();
    }

private:
    // Different for tokens, tensors, heads and dimensions, and seldom the type's zero.
    static T element(int token, std::size_t tensor, std::size_t head, std::size_t d) {
        return static_cast<T>(static_cast<std::size_t>(token) * 29 + tensor * 6 + head * 3 + d);
    }

    void check() {
        for (std::size_t layer = 0; layer < 2; ++layer) {
            CHECK(cache_.keys(layer) == addresses_[2 * layer] && cache_.values(layer) == addresses_[2 * layer + 1]);
            const T* keys = static_cast<const T*>(cache_.keys(layer));
            const T* values = static_cast<const T*>(cache_.values(layer));
            for (std::size_t head = 0; head < heads; ++head) {
                for (std::size_t slot = 0; slot < slots_; ++slot) {
                    for (std::size_t d = 0; d < dim; ++d) {
                        const bool used = slot < tokens_.size();
                        const T key = keys[(head * dim + d) * slots_ + slot];
                        const T value = values[(head * slots_ + slot) * dim + d];
                        CHECK(key == (used ? element(tokens_[slot], 2 * layer, head, d) : zero_));
                        CHECK(value == (used ? element(tokens_[slot], 2 * layer + 1, head, d) : zero_));
                    }
                }
            }
        }
    }

    T zero_;
    std::size_t shortest_;
    std::size_t slots_;
    meki::KvCache cache_;
    std::vector<void*> addresses_;
    std::vector<int> tokens_;
    int last_ = 0;
};

// From every context to every other and on, full or not; and again after a text that came further.
template <typename T>
void grown(const meki::ElementType& type, T zero) {
    const std::vector<std::size_t> lengths = {3, 4, 9, 23};
    for (unsigned taken = 1; taken < 16; taken += 2) {  // the shortest, and any of the others
        for (const bool full : {false, true}) {
            Checked<T> cache(type, zero, lengths);
            for (int text = 0; text < 2; ++text) {
                for (std::size_t i = 0; i < lengths.size(); ++i) {
                    if ((taken >> i & 1) == 0) {
                        continue;
                    }
                    cache.grow(lengths[i]);
                    const std::size_t end = full ? lengths[i] : lengths[i] - 1;
                    while (cache.length() < end) {
                        cache.write(std::min(num_tokens, end - cache.length()));
                    }
                }
                cache.clear();
            }
        }
    }
}

template <typename T>
void test(const meki::ElementType& type, T zero) {
    written_in_place(type, zero);
    grown(type, zero);
}

}  // namespace

int main() {
    test<float>({}, 0.0f);
    test<std::uint16_t>({meki::DType::float16, {}}, 0);
    test<std::int16_t>({meki::DType::int16, meki::Quantization{0.25f, -300}}, -300);
    test<std::uint8_t>({meki::DType::uint8, meki::Quantization{0.25f, 7}}, 7);
}
