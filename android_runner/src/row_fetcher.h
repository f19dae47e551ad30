// A reader thread that turns token ids into rows of the graph's type while the caller does other work.
//
// Hand over the ids the moment they are known, do whatever does not need the rows, then wait for
// them: what the wait costs is the stall, told apart from the time spent on I/O.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "row_reader.h"
#include "row_tensor.h"

namespace meki {

struct FetchStats {
    std::uint64_t io_us = 0;       // reading and dequantizing
    std::uint64_t stall_us = 0;    // the caller: waiting for rows that were not ready
    std::uint64_t bytes_read = 0;  // asked of the file
    std::uint64_t rows_read = 0;   // distinct rows, from the file
    std::uint64_t cache_hits = 0;  // distinct rows, from memory
    // Rows are due when the first part of the graph that takes them could start.
    std::uint64_t deadlines_missed = 0;     // times that they were not ready then
    std::optional<std::uint64_t> slack_us;  // how long before that they were: the least; none if none were due

    FetchStats& operator+=(const FetchStats& other);
};

class RowFetcher {
public:
    // Batches that may be under way at once: the one being waited for and the next.
    static constexpr std::size_t max_pending = 2;

    // `max_batch` is the most tokens of a batch.
    RowFetcher(std::unique_ptr<RowReader> reader, std::size_t max_batch);
    // Waits for the batch being read, drops the others.
    ~RowFetcher();
    RowFetcher(const RowFetcher&) = delete;
    RowFetcher& operator=(const RowFetcher&) = delete;

    // Starts fetching the rows of the tokens `sequence[position … position + count)` into the first
    // `count` tokens of `out`; its other tokens get no rows. Until the matching `wait`, `out` is the reader
    // thread's, and the sequence up to there must stay as it is. At most `max_pending` batches.
    void submit(const std::uint32_t* sequence, std::size_t position, std::size_t count, RowTensor& out);

    // Blocks until the oldest batch that was not waited for is in place. Throws what its reading threw.
    // A batch that the reader thread has not begun — it is not running on a busy machine — is fetched
    // here and now: that costs one read, where waiting would cost the scheduler's time slices.
    FetchStats wait();

    // The reader, for use while no batch is pending.
    RowReader& reader() { return *reader_; }

private:
    // Where consecutive rows go: sorted, so that the file is read forwards and each row once.
    struct Target {
        RowRun run;
        std::size_t token;
        std::size_t place;
    };
    struct Batch {
        const std::uint32_t* sequence = nullptr;
        std::size_t position = 0;
        std::size_t count = 0;
        RowTensor* out = nullptr;
        FetchStats stats;
        std::uint64_t ready_us = 0;
        std::exception_ptr failure;
    };

    void run();
    // Claims and fetches the oldest batch that nobody began; `lock` is open meanwhile.
    void fetch_next(std::unique_lock<std::mutex>& lock);
    void fetch(Batch& batch);
    // One run, in the type that the graph takes. Returns the bytes asked of the file.
    std::size_t read(const RowRun& run, const ElementType& type, void* rows);
    void locate(const Batch& batch);

    std::unique_ptr<RowReader> reader_;
    [[maybe_unused]] std::size_t max_batch_;  // checked only where assertions are on
    std::array<Batch, max_pending> batches_;
    // Of the batch that is being fetched.
    std::vector<RowRun> runs_;
    std::vector<Target> targets_;
    Buffer<float> scratch_;  // a run, where the graph takes integers that are not those of the file

    std::mutex mutex_;
    std::condition_variable work_signal_;
    std::condition_variable finished_signal_;
    // Batches ever submitted, begun, finished and waited for; batch n lives in slot n % max_pending.
    // At most one is begun and not finished, since the reader serves one thread at a time.
    std::uint64_t submitted_ = 0;
    std::uint64_t begun_ = 0;
    std::uint64_t finished_ = 0;
    std::uint64_t taken_ = 0;
    bool stopping_ = false;

    std::thread thread_;  // last: it starts when everything above is ready
};

}  // namespace meki
