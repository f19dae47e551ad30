#include "row_reader.h"

#include <cassert>
#include <cerrno>
#include <fcntl.h>
#include <unistd.h>
#include <utility>

#include "buffer.h"
#include "bus_error.h"
#include "error.h"
#include "file_map.h"

namespace meki {

namespace {

std::uint64_t round_down(std::uint64_t value) { return value / page_bytes * page_bytes; }
std::uint64_t round_up(std::uint64_t value) { return round_down(value + page_bytes - 1); }

// The page cache's default read-ahead stays on: for rows of some pages it measured faster than
// POSIX_FADV_RANDOM, which splits a row into single-page reads.
class PreadReader final : public RowReader {
public:
    explicit PreadReader(RomFile file) : RowReader(std::move(file)), rows_(max_run_bytes()) {}

private:
    Fetched fetch(std::uint64_t offset, std::size_t count, float* out) override {
        const File& file = rom().file();
        const std::size_t wanted = rom().run_bytes(count);
        if (read_at(file.descriptor(), rows_.data(), wanted, offset, file.path()) < wanted) {
            fail_short(offset);
        }
        return {wanted, dequantize(rows_.data(), count, out), rows_.data()};
    }

    void prefetch(std::uint64_t offset, std::size_t num_bytes) override {
        ::posix_fadvise(rom().file().descriptor(), static_cast<off_t>(offset), static_cast<off_t>(num_bytes),
                        POSIX_FADV_WILLNEED);
    }

    Buffer<std::uint8_t> rows_;
};

// Reads the whole pages that hold the rows: O_DIRECT wants offset, length and memory aligned.
class DirectReader final : public RowReader {
public:
    explicit DirectReader(RomFile file)
        : RowReader(std::move(file)), pages_(round_up(max_run_bytes()) + page_bytes) {
        const int descriptor = rom().file().descriptor();
        const int flags = ::fcntl(descriptor, F_GETFL);
        if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) {
            throw Error("the file system does not support O_DIRECT: " + describe_errno(errno), rom().file().path(),
                        "use --io pread");
        }
    }

private:
    Fetched fetch(std::uint64_t offset, std::size_t count, float* out) override {
        const File& file = rom().file();
        const std::uint64_t begin = round_down(offset);
        const auto skip = static_cast<std::size_t>(offset - begin);
        const std::size_t wanted = skip + rom().run_bytes(count);
        const auto length = static_cast<std::size_t>(round_up(wanted));
        std::size_t done = 0;
        while (done < wanted) {
            const std::size_t got =
                read_at_once(file.descriptor(), pages_.data() + done, length - done, begin + done, file.path());
            done += got;
            if (got % page_bytes != 0 || got == 0) {
                break;  // a read that ends inside a page ended at the end of the file
            }
        }
        if (done < wanted) {
            fail_short(offset);
        }
        return {length, dequantize(pages_.data() + skip, count, out), pages_.data() + skip};
    }

    void prefetch(std::uint64_t, std::size_t) override {}  // there is no cache to fetch into

    Buffer<std::uint8_t> pages_;
};

// Asks for the rows' pages in one piece before it touches them: a fault a page is several times slower.
class MmapReader final : public RowReader {
public:
    explicit MmapReader(RomFile file) : RowReader(std::move(file)), map_(rom().file()) { install_bus_error_handler(); }

private:
    struct Copy {
        const MmapReader* reader;
        const std::uint8_t* rows;
        std::size_t count;
        float* out;
        Damage damage;
    };

    Fetched fetch(std::uint64_t offset, std::size_t count, float* out) override {
        prefetch(offset, rom().run_bytes(count));
        Copy copy{this, map_.data() + offset, count, out, {}};
        const bool whole = touch_mapped(
            [](void* context) {
                Copy& job = *static_cast<Copy*>(context);
                job.damage = job.reader->dequantize(job.rows, job.count, job.out);
            },
            &copy);
        if (!whole) {
            fail_short(offset);
        }
        return {rom().run_bytes(count), copy.damage, nullptr};
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

std::size_t RowReader::read(const RowRun& run, float* out) {
    check(run);
    if (is_cached(run)) {
        for (std::size_t row = 0; row < run.count; ++row) {
            rom_.dequantize(cache_->find(run.first + row), out + row * rom_.row_dim());
        }
        return 0;
    }
    const Fetched fetched = fetch(rom_.row_offset(run.first), run.count, out);
    if (fetched.damage.segment != nullptr) {
        fail_damaged(run.first + fetched.damage.row, *fetched.damage.segment);
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

RowReader::Damage RowReader::dequantize(const std::uint8_t* rows, std::size_t count, float* out) const noexcept {
    for (std::size_t row = 0; row < count; ++row) {
        const Segment* damaged = rom_.dequantize(rows + row * rom_.row_stride(), out + row * rom_.row_dim());
        if (damaged != nullptr) {
            return {row, damaged};
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

void RowReader::fail_damaged(std::uint64_t id, const Segment& segment) const {
    const bool scaled = segment.codec->scale_group != 0;
    throw Error("row " + std::to_string(id) + ", layer " + std::to_string(segment.layer) + " memory " +
                    std::to_string(segment.memory) +
                    (scaled ? ": a scale is negative, NaN or infinite" : ": an element is NaN or infinite"),
                rom_.file().path(), "copy the file again, and compare it with `meki-edge verify`");
}

void RowReader::fail_short(std::uint64_t offset) const {
    throw Error("the row at byte " + std::to_string(offset) + " cannot be read whole: the file ends there now, or the "
                "storage failed",
                rom_.file().path(), "check the storage, or copy the file again");
}

std::unique_ptr<RowReader> open_reader(RomFile rom, IoMode mode, std::uint64_t cache_bytes) {
    assert(cache_bytes == 0 || mode != IoMode::mmap);
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
