#include "row_fetcher.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "clock.h"

namespace meki {

FetchStats& FetchStats::operator+=(const FetchStats& other) {
    io_us += other.io_us;
    stall_us += other.stall_us;
    bytes_read += other.bytes_read;
    rows_read += other.rows_read;
    return *this;
}

RowFetcher::RowFetcher(std::unique_ptr<RowReader> reader, std::size_t max_batch)
    : reader_(std::move(reader)), max_batch_(max_batch) {
    for (Batch& batch : batches_) {
        batch.targets.reserve(max_batch);
    }
    thread_ = std::thread([this] { run(); });
}

RowFetcher::~RowFetcher() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    work_signal_.notify_one();
    thread_.join();
}

void RowFetcher::submit(const std::uint32_t* ids, std::size_t count, float* out) {
    assert(count <= max_batch_ && submitted_ - taken_ < max_pending);
    // The slot is free: its last batch was waited for, and the reader only looks at submitted ones.
    Batch& batch = batches_[submitted_ % max_pending];
    batch.targets.clear();
    for (std::size_t i = 0; i < count; ++i) {
        batch.targets.push_back({ids[i], static_cast<std::uint32_t>(i)});
    }
    batch.out = out;
    batch.stats = {};
    batch.failure = nullptr;
    {
        const std::lock_guard lock(mutex_);
        ++submitted_;
    }
    work_signal_.notify_one();
}

FetchStats RowFetcher::wait() {
    assert(taken_ < submitted_);
    std::unique_lock lock(mutex_);
    std::uint64_t stall_us = 0;
    if (finished_ == taken_) {
        const std::uint64_t begin = now_us();
        if (begun_ == taken_) {
            fetch_next(lock);
        } else {
            finished_signal_.wait(lock, [this] { return finished_ > taken_; });
        }
        stall_us = now_us() - begin;
    }
    Batch& batch = batches_[taken_ % max_pending];
    ++taken_;
    if (batch.failure) {
        std::rethrow_exception(std::exchange(batch.failure, nullptr));
    }
    FetchStats stats = batch.stats;
    stats.stall_us = stall_us;
    return stats;
}

void RowFetcher::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        work_signal_.wait(lock, [this] { return stopping_ || (submitted_ > begun_ && begun_ == finished_); });
        if (stopping_) {
            return;
        }
        fetch_next(lock);
        finished_signal_.notify_one();
    }
}

void RowFetcher::fetch_next(std::unique_lock<std::mutex>& lock) {
    Batch& batch = batches_[begun_++ % max_pending];
    lock.unlock();
    try {
        fetch(batch);
    } catch (...) {
        batch.failure = std::current_exception();
    }
    lock.lock();
    ++finished_;
    if (submitted_ > begun_) {
        work_signal_.notify_one();
    }
}

void RowFetcher::fetch(Batch& batch) {
    const std::uint64_t begin = now_us();
    std::vector<Target>& targets = batch.targets;
    const std::size_t row_dim = reader_->rom().row_dim();
    if (targets.size() > 1) {
        std::sort(targets.begin(), targets.end(), [](const Target& a, const Target& b) {
            return a.id != b.id ? a.id < b.id : a.position < b.position;
        });
        for (const Target& target : targets) {
            reader_->announce(target.id);
        }
    }
    const float* previous = nullptr;
    for (std::size_t i = 0; i < targets.size(); ++i) {
        float* row = batch.out + targets[i].position * row_dim;
        if (i > 0 && targets[i].id == targets[i - 1].id) {
            std::memcpy(row, previous, row_dim * sizeof(float));
        } else {
            batch.stats.bytes_read += reader_->read(targets[i].id, row);
            ++batch.stats.rows_read;
        }
        previous = row;
    }
    batch.stats.io_us = now_us() - begin;
}

}  // namespace meki
