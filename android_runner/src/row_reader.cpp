#include "row_reader.h"

#include <cassert>
#include <cerrno>
#include <fcntl.h>
#include <unistd.h>
#include <utility>

#include "buffer.h"
#include "bus_error.h"
#include "checksum.h"
#include "error.h"
#include "file_map.h"
#include "read_ahead.h"

namespace meki {

namespace {

// The page cache's default read-ahead stays on: for rows of some pages it measured faster than
// POSIX_FADV_RANDOM, which splits a row into single-page reads.
class PreadReader final : public RowReader {
public:
    explicit PreadReader(RomFile file) : RowReader(std::move(file)), rows_(max_run_bytes()) {}

private:
    Fetched fetch(const RowRun& run, const Destination& to) override {
        const File& file = rom().file();
        const std::size_t wanted = rom().run_bytes(run.count);
        const bool as_they_are = to.element == RowElement::raw && wanted == run.count * rom().row_bytes();
        std::uint8_t* rows = as_they_are ? to.out : rows_.data();
        if (read_at(file.descriptor(), rows, wanted, offset_of(run), file.path()) < wanted) {
            fail_short(offset_of(run));
        }
        return {wanted, deliver(run, rows, to), rows};
    }

    void prefetch(std::uint64_t offset, std::size_t num_bytes) override {
        ::posix_fadvise(rom().file().descriptor(), static_cast<off_t>(offset), static_cast<off_t>(num_bytes),
                        POSIX_FADV_WILLNEED);
    }

    Buffer<std::uint8_t> rows_;
};

// Reads the whole pages that hold the rows, into memory of its own, and ahead those that are announced.
class DirectReader final : public RowReader {
public:
    explicit DirectReader(RomFile file)
        : RowReader(std::move(file)),
          pages_(Extent::max_length(max_run_bytes())),
          ahead_(rom().file(), max_run_bytes()) {
        const int descriptor = rom().file().descriptor();
        const int flags = ::fcntl(descriptor, F_GETFL);
        if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) {
            throw Error("the file system does not support O_DIRECT: " + describe_errno(errno), rom().file().path(),
                        "use --io pread");
        }
    }

private:
    Fetched fetch(const RowRun& run, const Destination& to) override {
        const Extent extent{offset_of(run), rom().run_bytes(run.count)};
        const std::uint8_t* pages = ahead_.take(extent);
        if (pages == nullptr) {
            if (!read_pages(rom().file(), extent, pages_.data())) {
                fail_short(extent.offset);
            }
            pages = pages_.data();
        }
        return {extent.length(), deliver(run, pages + extent.skip(), to), pages + extent.skip()};
    }

    void prefetch(std::uint64_t offset, std::size_t num_bytes) override { ahead_.announce({offset, num_bytes}); }

    void release_pages() override { ahead_.forget(); }

    Buffer<std::uint8_t> pages_;  // of a run that was not read ahead
    ReadAhead ahead_;
};

// Asks for the rows' pages in one piece before it touches them: a fault a page is several times slower.
class MmapReader final : public RowReader {
public:
    explicit MmapReader(RomFile file) : RowReader(std::move(file)), map_(rom().file()) { install_bus_error_handler(); }

private:
    struct Delivery {
        MmapReader* reader;
        const RowRun& run;
        const Destination& to;
        Damage damage;
    };

    Fetched fetch(const RowRun& run, const Destination& to) override {
        prefetch(offset_of(run), rom().run_bytes(run.count));
        Delivery delivery{this, run, to, {}};
        const bool whole = touch_mapped(
            [](void* context) {
                Delivery& job = *static_cast<Delivery*>(context);
                const std::uint8_t* rows = job.reader->map_.data() + job.reader->offset_of(job.run);
                job.damage = job.reader->deliver(job.run, rows, job.to);
            },
            &delivery);
        if (!whole) {
            fail_short(offset_of(run));
        }
        return {rom().run_bytes(run.count), delivery.damage, nullptr};
    }

    void prefetch(std::uint64_t offset, std::size_t num_bytes) override {
        map_.will_need(static_cast<std::size_t>(offset), num_bytes);
    }

    void release_pages() override { map_.release(); }

    FileMap map_;
};

}  // namespace

const char* name_of(IoMode mode) {
    switch (mode) {
        case IoMode::pread:
            return "pread";
        case IoMode::direct:
            return "direct";
        case IoMode::mmap:
            return "mmap";
    }
    return "";
}

std::size_t RowReader::read(const RowRun& run, RowElement element, void* out) {
    assert(element != RowElement::raw || rom_.quantization() != nullptr);
    check(run);
    const Destination to{element, static_cast<std::uint8_t*>(out)};
    if (is_cached(run)) {
        for (std::size_t row = 0; row < run.count; ++row) {
            rom_.deliver(cache_->find(run.first + row), element, floats_.data(),
                         to.out + row * rom_.delivered_bytes(element));
        }
        return 0;
    }
    const Fetched fetched = fetch(run, to);
    if (fetched.damage.found) {
        fail_damaged(run, fetched.damage, element);
    }
    if (cache_) {
        for (std::size_t row = 0; row < run.count; ++row) {
            cache_->insert(run.first + row, fetched.rows + row * rom_.row_stride());
        }
    }
    return fetched.num_bytes;
}

void RowReader::announce(const RowRun& run) {
    check(run);
    if (!is_cached(run)) {
        prefetch(rom_.row_offset(run.first), rom_.run_bytes(run.count));
    }
}

void RowReader::drop_page_cache() {
    if (cache_) {
        cache_->clear();
    }
    release_pages();
    const int descriptor = rom_.file().descriptor();
    ::fsync(descriptor);  // pages not yet written cannot be dropped
    const int code = ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
    if (code != 0) {
        throw Error("cannot drop the page cache: " + describe_errno(code), rom_.file().path(),
                    "run without --drop-page-cache");
    }
}

RowReader::Damage RowReader::deliver(const RowRun& run, const std::uint8_t* rows, const Destination& to) noexcept {
    const std::size_t pitch = rom_.delivered_bytes(to.element);
    for (std::size_t row = 0; row < run.count; ++row) {
        const std::uint8_t* bytes = rows + row * rom_.row_stride();
        if (!checksums_.empty() &&
            crc32(bytes, rom_.row_bytes()) != checksums_[static_cast<std::size_t>(run.first + row)]) {
            return {true, row, nullptr};
        }
        const Segment* damaged = rom_.deliver(bytes, to.element, floats_.data(), to.out + row * pitch);
        if (damaged != nullptr) {
            return {true, row, damaged};
        }
    }
    return {};
}

void RowReader::check(const RowRun& run) const {
    assert(run.count >= 1 && run.count <= rom_.address().rows_per_run());
    if (run.first >= rom_.num_rows() || run.count > rom_.num_rows() - run.first) {
        throw Error("row " + std::to_string(run.first + run.count - 1) + " is not in the file, which has " +
                        std::to_string(rom_.num_rows()),
                    rom_.file().path(), "use the tokenizer and the ROM of one model");
    }
}

// All of them: what is missing is one read, whose length hardly matters.
bool RowReader::is_cached(const RowRun& run) const {
    if (!cache_) {
        return false;
    }
    for (std::size_t row = 0; row < run.count; ++row) {
        if (!cache_->contains(run.first + row)) {
            return false;
        }
    }
    return true;
}

void RowReader::fail_damaged(const RowRun& run, const Damage& damage, RowElement element) const {
    std::string what = "row " + std::to_string(run.first + damage.row);
    if (damage.segment == nullptr) {
        what += ": the checksum does not match";
    } else {
        const Segment& segment = *damage.segment;
        what += ", layer " + std::to_string(segment.layer) + " memory " + std::to_string(segment.memory);
        what += segment.codec->scale_group != 0 ? ": a scale is negative, NaN or infinite"
                                                : ": an element is NaN or infinite";
        what += element == RowElement::float16 ? ", or too large for float16" : "";
    }
    throw Error(what, rom_.file().path(), "copy the file again, and compare it with `meki-edge verify`");
}

void RowReader::fail_short(std::uint64_t offset) const {
    throw Error("the row at byte " + std::to_string(offset) + " cannot be read whole: the file ends there now, or the "
                "storage failed",
                rom_.file().path(), "check the storage, or copy the file again");
}

std::unique_ptr<RowReader> open_reader(RomFile rom, IoMode mode, std::uint64_t cache_bytes, bool verify_rows) {
    assert(cache_bytes == 0 || mode != IoMode::mmap);
    // Before the file may become one of whole pages only.
    std::vector<std::uint32_t> checksums = verify_rows ? rom.read_checksums() : std::vector<std::uint32_t>{};
    std::unique_ptr<RowReader> reader;
    switch (mode) {
        case IoMode::pread:
            reader = std::make_unique<PreadReader>(std::move(rom));
            break;
        case IoMode::direct:
            reader = std::make_unique<DirectReader>(std::move(rom));
            break;
        case IoMode::mmap:
            reader = std::make_unique<MmapReader>(std::move(rom));
            break;
    }
    reader->checksums_ = std::move(checksums);
    if (cache_bytes > 0) {
        const RomFile& file = reader->rom();
        if (reader->cache_.emplace(cache_bytes, file.row_bytes(), file.num_rows()).capacity() == 0) {
            throw Error("a row cache of " + std::to_string(cache_bytes) + " bytes holds no row of " +
                            std::to_string(file.row_bytes()),
                        file.file().path(), "raise --row-cache-bytes, or leave it out");
        }
    }
    return reader;
}

}  // namespace meki
