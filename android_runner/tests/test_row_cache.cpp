// The cache gives back what was put in, keeps to its budget, and keeps what is asked for.

#include "row_cache.h"

#include <map>

#include "check.h"

namespace {

constexpr std::size_t row_bytes = 10;

std::vector<std::uint8_t> row_of(std::uint64_t id) {
    std::vector<std::uint8_t> row(row_bytes);
    for (std::size_t i = 0; i < row_bytes; ++i) {
        row[i] = static_cast<std::uint8_t>(id * 31 + i);
    }
    return row;
}

bool holds(meki::RowCache& cache, std::uint64_t id) {
    const std::uint8_t* found = cache.find(id);
    CHECK(cache.contains(id) == (found != nullptr));
    CHECK(found == nullptr || std::vector<std::uint8_t>(found, found + row_bytes) == row_of(id));
    return found != nullptr;
}

// CLOCK as a list of (id, asked for), written plainly.
struct Model {
    std::size_t capacity;
    std::vector<std::pair<std::uint64_t, bool>> slots;
    std::size_t hand = 0;

    bool find(std::uint64_t id) {
        for (auto& [held, asked_for] : slots) {
            if (held == id) {
                return asked_for = true;
            }
        }
        return false;
    }
    void insert(std::uint64_t id) {
        if (slots.size() < capacity) {
            slots.push_back({id, false});
            return;
        }
        for (; slots[hand].second; hand = (hand + 1) % capacity) {
            slots[hand].second = false;
        }
        slots[hand] = {id, false};
        hand = (hand + 1) % capacity;
    }
};

void like_the_model(std::size_t capacity, std::uint64_t num_ids, std::uint64_t spread) {
    meki::RowCache cache(capacity * (row_bytes + 25), row_bytes, UINT64_MAX);
    CHECK(cache.capacity() == capacity);
    Model model{capacity, {}};
    std::uint32_t random = 7;
    for (int i = 0; i < 20000; ++i) {
        random = random * 1664525u + 1013904223u;
        const std::uint64_t draw = (std::uint64_t{random} * num_ids) >> 32;
        const std::uint64_t id = draw * draw / num_ids * spread;  // small ones are frequent
        const bool expected = model.find(id);
        CHECK(holds(cache, id) == expected);
        if (!expected) {
            model.insert(id);
            cache.insert(id, row_of(id).data());
        }
    }
    for (const auto& [id, asked_for] : model.slots) {
        CHECK(holds(cache, id));
    }
    cache.clear();
    CHECK(!holds(cache, model.slots.front().first));
    cache.insert(3, row_of(3).data());
    cache.insert(3, row_of(3).data());
    CHECK(holds(cache, 3));
}

}  // namespace

int main() {
    like_the_model(1, 10, 1);
    like_the_model(2, 10, 1);
    like_the_model(50, 120, 1);
    like_the_model(64, 1000, std::uint64_t{1} << 40);
    CHECK(meki::RowCache(row_bytes, row_bytes, 100).capacity() == 0);
    CHECK(!meki::RowCache(row_bytes, row_bytes, 100).contains(1));
    CHECK(meki::RowCache(UINT64_MAX, row_bytes, 7).capacity() == 7);
}
