#include "row_cache.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace meki {

namespace {

// An id, a flag, and two to four entries of the index.
constexpr std::size_t bookkeeping_bytes = 8 + 1 + 4 * 4;
constexpr std::uint64_t max_slots = std::uint64_t{1} << 30;

std::size_t slots_for(std::uint64_t max_bytes, std::size_t row_bytes, std::uint64_t num_rows) {
    return static_cast<std::size_t>(std::min({max_bytes / (row_bytes + bookkeeping_bytes), num_rows, max_slots}));
}

std::size_t index_size(std::size_t slots) {
    std::size_t size = 2;
    while (size < 2 * slots) {
        size *= 2;
    }
    return size;
}

}  // namespace

RowCache::RowCache(std::uint64_t max_bytes, std::size_t row_bytes, std::uint64_t num_rows)
    : row_bytes_(row_bytes),
      ids_(slots_for(max_bytes, row_bytes, num_rows)),
      asked_for_(ids_.size()),
      rows_(ids_.size() * row_bytes),
      index_(index_size(ids_.size()), nowhere) {}

const std::uint8_t* RowCache::find(std::uint64_t id) {
    const std::uint32_t slot = index_[find_place(id)];
    if (slot == nowhere) {
        return nullptr;
    }
    asked_for_[slot] = 1;
    return rows_.data() + slot * row_bytes_;
}

void RowCache::insert(std::uint64_t id, const std::uint8_t* row) {
    assert(capacity() > 0);
    if (contains(id)) {
        return;
    }
    const std::uint32_t slot = free_slot();
    index_[find_place(id)] = slot;  // found now: evicting moves entries
    ids_[slot] = id;
    asked_for_[slot] = 0;
    std::memcpy(rows_.data() + slot * row_bytes_, row, row_bytes_);
}

void RowCache::clear() {
    std::fill(index_.begin(), index_.end(), nowhere);
    used_ = 0;
    hand_ = 0;
}

std::size_t RowCache::find_place(std::uint64_t id) const {
    std::size_t place = home(id);
    while (index_[place] != nowhere && ids_[index_[place]] != id) {
        place = (place + 1) & (index_.size() - 1);
    }
    return place;
}

std::size_t RowCache::home(std::uint64_t id) const {
    // Fibonacci hashing: neighbouring ids spread over the index.
    return static_cast<std::size_t>((id * 0x9e3779b97f4a7c15u) >> 32) & (index_.size() - 1);
}

std::uint32_t RowCache::free_slot() {
    if (used_ < capacity()) {
        return static_cast<std::uint32_t>(used_++);
    }
    while (asked_for_[hand_] != 0) {
        asked_for_[hand_] = 0;
        hand_ = static_cast<std::uint32_t>((hand_ + 1) % capacity());
    }
    const std::uint32_t slot = hand_;
    erase(find_place(ids_[slot]));
    hand_ = static_cast<std::uint32_t>((hand_ + 1) % capacity());
    return slot;
}

// Closes the gap: entries after it that would no longer be found move back into it.
void RowCache::erase(std::size_t place) {
    const std::size_t mask = index_.size() - 1;
    for (std::size_t next = (place + 1) & mask; index_[next] != nowhere; next = (next + 1) & mask) {
        if (((next - home(ids_[index_[next]])) & mask) >= ((next - place) & mask)) {
            index_[place] = index_[next];
            place = next;
        }
    }
    index_[place] = nowhere;
}

}  // namespace meki
