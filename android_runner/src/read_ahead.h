// Reads what is wanted soon on threads of its own, as the page cache does for reads that go through it.
//
// Storage is fast only with several reads under way, and threads are the one way to have them that an app on
// Android may use: io_uring and libaio are closed to it. They sleep but for the few microseconds of a call.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "buffer.h"
#include "file.h"

namespace meki {

// Bytes of a file, and the whole pages that hold them: O_DIRECT wants offset, length and memory aligned.
struct Extent {
    std::uint64_t offset;
    std::size_t num_bytes;

    std::uint64_t first_page() const;  // where it begins
    std::size_t skip() const;          // what it holds before those bytes
    std::size_t length() const;        // of all pages
    // The length of the longest, wherever it lies.
    static std::size_t max_length(std::size_t num_bytes);
};

// Reads the pages of an extent into `out` [length]; false if the file ends inside the extent. Throws Error if the
// storage failed.
bool read_pages(const File& file, const Extent& extent, std::uint8_t* out);

// Serves one thread, which announces extents and then takes them in that order. What is not here, for whatever
// reason (not announced, too many, nobody began it, it failed), that thread reads itself, and meets its errors.
class ReadAhead {
public:
    // `file` must stay where it is. No extent has more than `max_extent_bytes`.
    ReadAhead(const File& file, std::size_t max_extent_bytes);
    // Waits for the reads under way.
    ~ReadAhead();
    ReadAhead(const ReadAhead&) = delete;
    ReadAhead& operator=(const ReadAhead&) = delete;

    // By ascending offset: an extent that is not, such as the same once more, is left out. The first one after a
    // `take` forgets those before it. The first of all is not read, since it is the one that is taken right away:
    // threads start with the second.
    void announce(const Extent& extent);
    // The pages of an announced extent, for the first time that it is taken, else null. Waits for its read if that is
    // under way. They are the caller's until the next `take` or `announce`.
    const std::uint8_t* take(const Extent& extent);
    // Forgets what was announced. Waits for the reads under way.
    void forget();

private:
    enum class State : std::uint8_t { missing, reading, here };

    void start_thread();
    void run();
    bool may_begin() const { return begun_ < extents_.size() && begun_ + 1 < taken_ + states_.size(); }
    std::size_t slot(std::size_t i) const { return i % states_.size(); }
    std::uint8_t* pages(std::size_t i) const { return pages_.data() + slot(i) * slot_bytes_; }
    // Takes the oldest extent that was not taken: waits if it is being read. Returns whether its pages are here.
    bool take_oldest(std::unique_lock<std::mutex>& lock);

    const File& file_;
    const std::size_t slot_bytes_;
    bool taking_ = false;  // whether something was taken since the last announcement

    std::mutex mutex_;
    std::condition_variable work_signal_;
    std::condition_variable finished_signal_;
    std::vector<Extent> extents_;  // announced
    // Extents begun (the first by the caller), taken, and being read. Extent i has slot i % slots from its begin until
    // another is taken after it: the caller may be looking at the last one.
    std::size_t begun_ = 1;
    std::size_t taken_ = 0;
    std::size_t reading_ = 0;
    std::vector<State> states_;   // of each slot
    Buffer<std::uint8_t> pages_;  // [slots, slot_bytes]; empty until a thread starts
    bool stopping_ = false;

    std::vector<std::thread> threads_;
};

}  // namespace meki
