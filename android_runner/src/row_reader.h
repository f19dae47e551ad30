// Reads single rows of a ROM file and dequantizes them.
//
// One token's row is one read. A reader belongs to one thread at a time: it has one scratch buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "rom_file.h"

namespace meki {

// pread: through the page cache. direct: O_DIRECT, past it. mmap: a map of the file.
enum class IoMode { pread, direct, mmap };

const char* name_of(IoMode mode);

class RowReader {
public:
    virtual ~RowReader() = default;

    const RomFile& rom() const { return rom_; }

    // Fetches row `id` into `out` [row_dim]. Returns the bytes that were asked of the file. Throws
    // Error if the id is out of range, the row is damaged, the file shrank, or the storage failed.
    std::size_t read(std::uint64_t id, float* out);

    // Says that row `id` is wanted soon, so that the storage works on several at once: 128 cold rows
    // announced before they are read took a third of the time, on one thread.
    void announce(std::uint64_t id);

    // Removes the file from the page cache, so that the next reads are cold. Needs no privileges.
    void drop_page_cache();

protected:
    explicit RowReader(RomFile rom) : rom_(std::move(rom)) {}

    struct Fetched {
        std::size_t num_bytes;   // asked of the file
        const Segment* damaged;  // the first damaged segment, or null
    };
    // Fetches and dequantizes the row at byte `offset` of the file.
    virtual Fetched fetch(std::uint64_t offset, float* out) = 0;
    virtual void prefetch(std::uint64_t offset) = 0;
    virtual void release_pages() {}

    [[noreturn]] void fail_short(std::uint64_t offset) const;

private:
    void check(std::uint64_t id) const;
    [[noreturn]] void fail_damaged(std::uint64_t id, const Segment& segment) const;

    RomFile rom_;
};

// Throws Error if the file system does not support `mode`.
std::unique_ptr<RowReader> open_reader(RomFile rom, IoMode mode);

}  // namespace meki
