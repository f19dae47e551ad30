// Reads rows of a ROM file and turns them into what a graph takes.
//
// Consecutive rows are one read. A reader belongs to one thread at a time: it has one scratch buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buffer.h"
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

    // Fetches the rows of a run, at most the address's `rows_per_run`, into `out` [count, row_dim], aligned for
    // its elements. Raw rows without gaps are read straight into it. Returns the bytes that were asked of the
    // file: none if all rows were in the cache. Throws Error if a row is out of range or damaged, the file
    // shrank, or the storage failed.
    std::size_t read(const RowRun& run, RowElement element, void* out);
    std::size_t read(const RowRun& run, float* out) { return read(run, RowElement::float32, out); }

    // Says that a run is wanted soon, so that the storage works on several at once: 512 cold rows announced before
    // they are read took a quarter of the time. Announce a batch by ascending rows, then read it in that order: past
    // the page cache, where threads read ahead (see `ReadAhead`), other runs are left out. Runs that are not read
    // after all do no harm.
    void announce(const RowRun& run);

    // Removes the file from the page cache and empties the row cache, so that the next reads are cold.
    // Needs no privileges.
    void drop_page_cache();

protected:
    explicit RowReader(RomFile rom) : rom_(std::move(rom)), floats_(rom_.row_dim()) {}

    // Where the elements of a run go.
    struct Destination {
        RowElement element;
        std::uint8_t* out;
    };
    // What is wrong with the first damaged row of a run: a segment of it, or (null) its checksum.
    struct Damage {
        bool found;
        std::size_t row;
        const Segment* segment;
    };
    struct Fetched {
        std::size_t num_bytes;  // asked of the file
        Damage damage;
        const std::uint8_t* rows;  // as they are in the file, until the next fetch or prefetch
    };
    virtual Fetched fetch(const RowRun& run, const Destination& to) = 0;
    virtual void prefetch(std::uint64_t offset, std::size_t num_bytes) = 0;
    virtual void release_pages() {}

    // The bytes of the longest run.
    std::size_t max_run_bytes() const { return rom_.run_bytes(rom_.address().rows_per_run()); }
    // Checks and converts the rows of a run, whose bytes are at `rows`. Does not throw, so it may read from a map.
    Damage deliver(const RowRun& run, const std::uint8_t* rows, const Destination& to) noexcept;
    std::uint64_t offset_of(const RowRun& run) const { return rom_.row_offset(run.first); }
    [[noreturn]] void fail_short(std::uint64_t offset) const;

private:
    friend std::unique_ptr<RowReader> open_reader(RomFile, IoMode, std::uint64_t, bool);

    void check(const RowRun& run) const;
    bool is_cached(const RowRun& run) const;
    [[noreturn]] void fail_damaged(const RowRun& run, const Damage& damage, RowElement element) const;

    RomFile rom_;
    std::optional<RowCache> cache_;
    std::vector<std::uint32_t> checksums_;  // of all rows, or none
    Buffer<float> floats_;                  // a row on its way to float16
};

// `cache_bytes` of memory keep rows that are wanted again; not with `IoMode::mmap`, whose pages are such a
// cache. `verify_rows`: every row that is read is compared with its checksum. Throws Error if the file system
// does not support `mode`, if the cache would not hold a row, or if there are no checksums.
std::unique_ptr<RowReader> open_reader(RomFile rom, IoMode mode, std::uint64_t cache_bytes = 0,
                                       bool verify_rows = false);

}  // namespace meki
