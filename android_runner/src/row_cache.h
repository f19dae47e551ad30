// The bytes of rows that were wanted lately, within a fixed budget of memory.
//
// Eviction is CLOCK: a hand passes over the rows and takes the first that was not asked for again since
// it last came by. Text repeats its frequent tokens, so few rows serve many reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffer.h"

namespace meki {

class RowCache {
public:
    // At most `max_bytes`, bookkeeping included, and never more rows than `num_rows`.
    RowCache(std::uint64_t max_bytes, std::size_t row_bytes, std::uint64_t num_rows);

    // Rows that fit; 0: not even one.
    std::size_t capacity() const { return ids_.size(); }
    bool contains(std::uint64_t id) const { return index_[find_place(id)] != nowhere; }
    // The bytes of row `id`, until the next `insert`; null if it is not here.
    const std::uint8_t* find(std::uint64_t id);
    // Copies row `id`, `row_bytes` bytes, and forgets another if there is no room. It may be here already.
    void insert(std::uint64_t id, const std::uint8_t* row);
    void clear();

private:
    static constexpr std::uint32_t nowhere = UINT32_MAX;

    // Where the slot of `id` is entered in the index, or would be.
    std::size_t find_place(std::uint64_t id) const;
    std::size_t home(std::uint64_t id) const;
    std::uint32_t free_slot();
    void erase(std::size_t place);

    std::size_t row_bytes_;
    std::vector<std::uint64_t> ids_;           // of each slot
    std::vector<std::uint8_t> asked_for_;      // of each slot: since the hand came by
    Buffer<std::uint8_t> rows_;                // [slots, row_bytes]
    std::vector<std::uint32_t> index_;         // slots by id: open addressing, never more than half full
    std::size_t used_ = 0;
    std::uint32_t hand_ = 0;
};

}  // namespace meki
