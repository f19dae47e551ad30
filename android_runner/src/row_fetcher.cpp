#include "row_fetcher.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <tuple>
#include <utility>

#include "clock.h"
#include "interrupt.h"
#include "thread.h"

namespace meki {

namespace {

// What the integers of a static codec are, as a graph's input.
ElementType raw_type(const RomFile& rom) {
    return {rom.raw_element_bytes() == 1 ? DType::uint8 : DType::uint16, *rom.quantization()};
}

}  // namespace

FetchStats& FetchStats::operator+=(const FetchStats& other) {
    io_us += other.io_us;
    stall_us += other.stall_us;
    bytes_read += other.bytes_read;
    rows_read += other.rows_read;
    cache_hits += other.cache_hits;
    deadlines_missed += other.deadlines_missed;
    if (other.slack_us) {
        slack_us = std::min(slack_us.value_or(*other.slack_us), *other.slack_us);
    }
    return *this;
}

RowFetcher::RowFetcher(std::unique_ptr<RowReader> reader, std::size_t max_batch)
    : reader_(std::move(reader)),
      max_batch_(max_batch),
      runs_(reader_->rom().address().runs_per_token()),
      scratch_(reader_->rom().address().rows_per_run() * reader_->rom().row_dim()) {
    targets_.reserve(max_batch * runs_.size());
    thread_ = start_thread([this] { run(); });
}

RowFetcher::~RowFetcher() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    work_signal_.notify_one();
    thread_.join();
}

void RowFetcher::submit(const std::uint32_t* sequence, std::size_t position, std::size_t count, RowTensor& out) {
    assert(count <= max_batch_ && count <= out.shape().num_tokens && submitted_ - taken_ < max_pending);
    // The slot is free: its last batch was waited for, and the reader only looks at submitted ones.
    batches_[submitted_ % max_pending] = {sequence, position, count, &out, {}, 0, nullptr};
    {
        const std::lock_guard lock(mutex_);
        ++submitted_;
    }
    work_signal_.notify_one();
}

FetchStats RowFetcher::wait() {
    assert(taken_ < submitted_);
    std::unique_lock lock(mutex_);
    const std::uint64_t due_us = now_us();
    const bool missed = finished_ == taken_;
    std::uint64_t stall_us = 0;
    if (missed) {
        if (begun_ == taken_) {
            fetch_next(lock);
        } else {
            finished_signal_.wait(lock, [this] { return finished_ > taken_; });
        }
        stall_us = now_us() - due_us;
    }
    Batch& batch = batches_[taken_ % max_pending];
    ++taken_;
    if (batch.failure) {
        std::rethrow_exception(std::exchange(batch.failure, nullptr));
    }
    FetchStats stats = batch.stats;
    stats.stall_us = stall_us;
    stats.deadlines_missed = missed ? 1 : 0;
    stats.slack_us = missed ? 0 : due_us - batch.ready_us;
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
    locate(batch);
    if (targets_.size() > 1) {
        std::sort(targets_.begin(), targets_.end(), [](const Target& a, const Target& b) {
            return std::tie(a.run.first, a.token, a.place) < std::tie(b.run.first, b.token, b.place);
        });
        for (const Target& target : targets_) {
            reader_->announce(target.run);
        }
    }
    const std::size_t row_dim = reader_->rom().row_dim();
    const ElementType& type = batch.out->type();
    const Target* previous = nullptr;
    const void* previous_rows = nullptr;
    for (const Target& target : targets_) {
        throw_if_interrupted();  // a batch may be of millions of tokens
        void* const rows = batch.out->row(target.token, target.place);
        if (previous != nullptr && target.run.first == previous->run.first) {
            // The same run: where runs start at the same row, they are one token's.
            std::memcpy(rows, previous_rows, target.run.count * row_dim * type.size());
        } else {
            const std::size_t num_bytes = read(target.run, type, rows);
            batch.stats.bytes_read += num_bytes;
            (num_bytes > 0 ? batch.stats.rows_read : batch.stats.cache_hits) += target.run.count;
        }
        previous = &target;
        previous_rows = rows;
    }
    batch.ready_us = now_us();
    batch.stats.io_us = batch.ready_us - begin;
}

std::size_t RowFetcher::read(const RowRun& run, const ElementType& type, void* rows) {
    if (type.dtype == DType::float32) {
        return reader_->read(run, RowElement::float32, rows);
    }
    if (type.dtype == DType::float16) {
        return reader_->read(run, RowElement::float16, rows);
    }
    const RomFile& rom = reader_->rom();
    if (rom.quantization() != nullptr && type == raw_type(rom)) {
        return reader_->read(run, RowElement::raw, rows);  // one quantization, not two
    }
    const std::size_t num_bytes = reader_->read(run, scratch_.data());
    encode(type, scratch_.data(), run.count * rom.row_dim(), rows);
    return num_bytes;
}

void RowFetcher::locate(const Batch& batch) {
    targets_.clear();
    for (std::size_t token = 0; token < batch.count; ++token) {
        const std::size_t num_runs = reader_->rom().locate(batch.sequence, batch.position + token, runs_.data());
        std::size_t place = 0;
        for (std::size_t i = 0; i < num_runs; ++i) {
            targets_.push_back({runs_[i], token, place});
            place += runs_[i].count;
        }
        batch.out->set_count(token, place);
    }
    for (std::size_t token = batch.count; token < batch.out->shape().num_tokens; ++token) {
        batch.out->set_count(token, 0);
    }
}

}  // namespace meki
