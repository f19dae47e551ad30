// Reads rows of a ROM file and dequantizes them.
//
// Consecutive rows are one read. A reader belongs to one thread at a time: it has one scratch buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "rom_file.h"
#include "row_cache.h"

namespace meki {

// pread: through the page cache. direct: O_DIRECT, past it. mmap: a map of the file.
enum class IoMode { pread, direct, mmap };

const char* name_of(IoMode mode);

class RowReader {
public:
    virtual ~RowReader() = default;

    const RomFile& rom() const { return rom_; }

    // Fetches the rows of a run, at most the address's `rows_per_run`, into `out` [count, row_dim]. Returns
    // the bytes that were asked of the file: none if all rows were in the cache. Throws Error if a row is
    // out of range or damaged, the file shrank, or the storage failed.
    std::size_t read(const RowRun& run, float* out);

    // Says that a run is wanted soon, so that the storage works on several at once: 128 cold rows
    // announced before they are read took a third of the time, on one thread.
    void announce(const RowRun& run);

    // Removes the file from the page cache and empties the row cache, so that the next reads are cold.
    // Needs no privileges.
    void drop_page_cache();

protected:
    explicit RowReader(RomFile rom) : rom_(std::move(rom)) {}

    // The first damaged segment of a run, which lies in its row number `row`; or null.
    struct Damage {
        std::size_t row;
        const Segment* segment;
    };
    struct Fetched {
        std::size_t num_bytes;  // asked of the file
        Damage damage;
        const std::uint8_t* rows;  // as they are in the file, until the next fetch
    };
    // Fetches and dequantizes `count` rows from byte `offset` of the file on.
    virtual Fetched fetch(std::uint64_t offset, std::size_t count, float* out) = 0;
    virtual void prefetch(std::uint64_t offset, std::size_t num_bytes) = 0;
    virtual void release_pages() {}

    // The bytes of the longest run.
    std::size_t max_run_bytes() const { return rom_.run_bytes(rom_.address().rows_per_run()); }
    // Dequantizes the `count` rows at `rows`. Does not throw, so it may read from a map.
    Damage dequantize(const std::uint8_t* rows, std::size_t count, float* out) const noexcept;
    [[noreturn]] void fail_short(std::uint64_t offset) const;

private:
    friend std::unique_ptr<RowReader> open_reader(RomFile rom, IoMode mode, std::uint64_t cache_bytes);

    void check(const RowRun& run) const;
    bool is_cached(const RowRun& run) const;
    [[noreturn]] void fail_damaged(std::uint64_t id, const Segment& segment) const;

    RomFile rom_;
    std::optional<RowCache> cache_;
};

// `cache_bytes` of memory keep rows that are wanted again; not with `IoMode::mmap`, whose pages are such a
// cache. Throws Error if the file system does not support `mode`, or if the cache would not hold a row.
std::unique_ptr<RowReader> open_reader(RomFile rom, IoMode mode, std::uint64_t cache_bytes = 0);

}  // namespace meki
