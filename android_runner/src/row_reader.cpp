#include "row_reader.h"

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
    explicit PreadReader(RomFile file) : RowReader(std::move(file)), row_(rom().row_bytes()) {}

private:
    Fetched fetch(std::uint64_t offset, float* out) override {
        const File& file = rom().file();
        if (read_at(file.descriptor(), row_.data(), row_.size(), offset, file.path()) < row_.size()) {
            fail_short(offset);
        }
        return {row_.size(), rom().dequantize(row_.data(), out)};
    }

    void prefetch(std::uint64_t offset) override {
        ::posix_fadvise(rom().file().descriptor(), static_cast<off_t>(offset), static_cast<off_t>(row_.size()),
                        POSIX_FADV_WILLNEED);
    }

    Buffer<std::uint8_t> row_;
};

// Reads the whole pages that hold a row: O_DIRECT wants offset, length and memory aligned.
class DirectReader final : public RowReader {
public:
    explicit DirectReader(RomFile file)
        : RowReader(std::move(file)), pages_(round_up(rom().row_bytes()) + page_bytes) {
        const int descriptor = rom().file().descriptor();
        const int flags = ::fcntl(descriptor, F_GETFL);
        if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) {
            throw Error("the file system does not support O_DIRECT: " + describe_errno(errno), rom().file().path(),
                        "use --io pread");
        }
    }

private:
    Fetched fetch(std::uint64_t offset, float* out) override {
        const File& file = rom().file();
        const std::uint64_t begin = round_down(offset);
        const auto skip = static_cast<std::size_t>(offset - begin);
        const std::size_t wanted = skip + rom().row_bytes();
        const auto length = static_cast<std::size_t>(round_up(wanted));
        std::size_t done = 0;
        while (done < wanted) {
            const std::size_t count =
                read_at_once(file.descriptor(), pages_.data() + done, length - done, begin + done, file.path());
            done += count;
            if (count % page_bytes != 0 || count == 0) {
                break;  // a read that ends inside a page ended at the end of the file
            }
        }
        if (done < wanted) {
            fail_short(offset);
        }
        return {length, rom().dequantize(pages_.data() + skip, out)};
    }

    void prefetch(std::uint64_t) override {}  // there is no cache to fetch into

    Buffer<std::uint8_t> pages_;
};

// Asks for the row's pages in one piece before it touches them: a fault a page is several times slower.
class MmapReader final : public RowReader {
public:
    explicit MmapReader(RomFile file) : RowReader(std::move(file)), map_(rom().file()) { install_bus_error_handler(); }

private:
    struct Copy {
        const RomFile* rom;
        const std::uint8_t* row;
        float* out;
        const Segment* damaged;
    };

    Fetched fetch(std::uint64_t offset, float* out) override {
        prefetch(offset);
        Copy copy{&rom(), map_.data() + offset, out, nullptr};
        const bool whole = touch_mapped(
            [](void* context) {
                Copy& job = *static_cast<Copy*>(context);
                job.damaged = job.rom->dequantize(job.row, job.out);
            },
            &copy);
        if (!whole) {
            fail_short(offset);
        }
        return {rom().row_bytes(), copy.damaged};
    }

    void prefetch(std::uint64_t offset) override {
        map_.will_need(static_cast<std::size_t>(offset), rom().row_bytes());
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

std::size_t RowReader::read(std::uint64_t id, float* out) {
    check(id);
    const Fetched fetched = fetch(rom_.row_offset(id), out);
    if (fetched.damaged != nullptr) {
        fail_damaged(id, *fetched.damaged);
    }
    return fetched.num_bytes;
}

void RowReader::announce(std::uint64_t id) {
    check(id);
    prefetch(rom_.row_offset(id));
}

void RowReader::drop_page_cache() {
    release_pages();
    const int descriptor = rom_.file().descriptor();
    ::fsync(descriptor);  // pages not yet written cannot be dropped
    const int code = ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
    if (code != 0) {
        throw Error("cannot drop the page cache: " + describe_errno(code), rom_.file().path(),
                    "run without --drop-page-cache");
    }
}

void RowReader::check(std::uint64_t id) const {
    if (id >= rom_.num_rows()) {
        throw Error("token id " + std::to_string(id) + " has no row: the file has " + std::to_string(rom_.num_rows()),
                    rom_.file().path(), "use the tokenizer and the ROM of one model");
    }
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

std::unique_ptr<RowReader> open_reader(RomFile rom, IoMode mode) {
    switch (mode) {
        case IoMode::pread:
            return std::make_unique<PreadReader>(std::move(rom));
        case IoMode::direct:
            return std::make_unique<DirectReader>(std::move(rom));
        case IoMode::mmap:
            return std::make_unique<MmapReader>(std::move(rom));
    }
    return nullptr;
}

}  // namespace meki
