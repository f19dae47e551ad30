// The three ways to read agree, and a file that shrinks, or storage that fails, is an error in each.

#include "row_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "temporary.h"

namespace {

const TemporaryDirectory directory;

constexpr meki::IoMode modes[] = {meki::IoMode::pread, meki::IoMode::direct, meki::IoMode::mmap};

std::unique_ptr<meki::RowReader> open(const std::string& path, meki::IoMode mode) {
    return meki::open_reader(meki::RomFile(path), mode);
}

void check_row(meki::RowReader& reader, std::uint64_t id) {
    std::vector<float> row(reader.rom().row_dim() + 1, -1.0f);
    CHECK(reader.read({id, 1}, row.data()) >= reader.rom().row_bytes());
    for (std::size_t i = 0; i < reader.rom().row_dim(); ++i) {
        CHECK(row[i] == rom_element(id, i));
    }
    CHECK(row.back() == -1.0f);
}

// Strides below a page, of a page and of several, and one that crosses pages: files need not be ours.
void modes_agree() {
    const std::uint64_t shapes[][3] = {{1000, 64, 13}, {50, 4096, 1024}, {9, 12288, 2500}, {41, 1000, 250}};
    for (const auto& shape : shapes) {
        const std::uint64_t num_rows = shape[0], stride = shape[1], dim = shape[2];
        const std::string path = directory / "rom.safetensors";
        write_rom(path, num_rows, stride, dim);
        for (const meki::IoMode mode : modes) {
            const auto reader = open(path, mode);
            for (std::uint64_t id = 0; id < num_rows; ++id) {
                reader->announce({id, 1});
                check_row(*reader, num_rows - 1 - id);
            }
            CHECK_ERROR(reader->read({num_rows, 1}, nullptr), "is not in the file, which has");
            CHECK_ERROR(reader->announce({UINT64_MAX, 1}), "is not in the file");
        }
    }
}

// Runs of consecutive rows, with and without gaps between them, are one read each.
void runs() {
    const std::vector<std::int64_t> offsets = {0, 1, 5, 7, 300, 301};
    for (const std::uint64_t stride : {1000u, 1024u, 1300u, 8192u}) {
        const std::string path = directory / "ragged.safetensors";
        write_ragged_rom(path, offsets, stride, 250);
        for (const meki::IoMode mode : modes) {
            const auto reader = open(path, mode);
            for (std::size_t token = 0; token + 1 < offsets.size(); ++token) {
                const auto first = static_cast<std::uint64_t>(offsets[token]);
                const auto count = static_cast<std::size_t>(offsets[token + 1] - offsets[token]);
                std::vector<float> rows(count * 250 + 1, -1.0f);
                reader->announce({first, count});
                const std::size_t num_bytes = reader->read({first, count}, rows.data());
                CHECK(num_bytes >= count * 1000 && num_bytes < count * stride + 2 * 4096);
                for (std::size_t i = 0; i < count * 250; ++i) {
                    CHECK(rows[i] == rom_element(first + i / 250, i % 250));
                }
                CHECK(rows.back() == -1.0f);
            }
            CHECK_ERROR(reader->read({300, 2}, nullptr), "row 301 is not in the file, which has 301");
            CHECK_ERROR(reader->read({UINT64_MAX, 2}, nullptr), "is not in the file");
        }
        for (const meki::IoMode mode : modes) {  // the file shrinks inside a run
            write_ragged_rom(path, offsets, stride, 250);
            const auto reader = open(path, mode);
            CHECK(::truncate(path.c_str(), static_cast<off_t>(4096 + 200 * stride)) == 0);
            std::vector<float> rows(293 * 250);
            CHECK_ERROR(reader->read({7, 293}, rows.data()), "cannot be read whole");
            reader->read({5, 2}, rows.data());
            CHECK(rows[250] == rom_element(6, 0));
        }
    }
}

// Offsets past 4 GiB, in a file that is all hole but for its last row.
void large_file() {
    constexpr std::uint64_t num_rows = 1 << 20, stride = 8192;
    const std::string path = directory / "large.safetensors";
    write_file(path, safetensors(rom_header(num_rows, stride, 4).dump(), ""));
    CHECK(::truncate(path.c_str(), 4096 + num_rows * stride) == 0);
    const int descriptor = ::open(path.c_str(), O_WRONLY);
    const float last[4] = {1, 2, 3, 4};
    CHECK(::pwrite(descriptor, last, sizeof last, 4096 + (num_rows - 1) * stride) == sizeof last);
    ::close(descriptor);
    for (const meki::IoMode mode : modes) {
        const auto reader = open(path, mode);
        float row[4];
        reader->read({num_rows - 1, 1}, row);
        CHECK(row[0] == 1 && row[3] == 4);
        reader->read({num_rows / 2 + 1, 1}, row);
        CHECK(row[0] == 0 && row[3] == 0);
    }
}

void shrinking_file() {
    for (const meki::IoMode mode : modes) {
        const std::string path = directory / "shrinking.safetensors";
        write_rom(path, 64, 4096, 1000);
        const auto reader = open(path, mode);
        check_row(*reader, 40);
        CHECK(::truncate(path.c_str(), 4096 + 30 * 4096 + 100) == 0);
        check_row(*reader, 29);
        std::vector<float> row(1000);
        CHECK_ERROR(reader->read({40, 1}, row.data()), "cannot be read whole");
        CHECK_ERROR(reader->read({63, 1}, row.data()), "cannot be read whole");
        if (mode != meki::IoMode::mmap) {  // a map is zero up to the end of the last page
            CHECK_ERROR(reader->read({30, 1}, row.data()), "cannot be read whole");
        }
        check_row(*reader, 0);  // and the reader still serves what is there
    }
}

void damaged_row() {
    const std::string path = directory / "damaged.safetensors";
    write_rom(path, 4, 64, 16);
    const int descriptor = ::open(path.c_str(), O_WRONLY);
    const std::uint32_t nan = 0x7fc00000;
    CHECK(::pwrite(descriptor, &nan, 4, 4096 + 2 * 64 + 8) == 4);
    ::close(descriptor);
    for (const meki::IoMode mode : modes) {
        const auto reader = open(path, mode);
        std::vector<float> row(16);
        CHECK_ERROR(reader->read({2, 1}, row.data()), "row 2, layer 0 memory 0: an element is NaN or infinite");
        check_row(*reader, 1);
    }
}

// An address that is not mapped cannot be read, and the kernel says so with a real EIO.
void failing_storage() {
    const int memory = ::open("/proc/self/mem", O_RDONLY);
    char byte;
    CHECK_ERROR(meki::read_at(memory, &byte, 1, 4096, "/proc/self/mem"), "Input/output error");
    ::close(memory);
}

std::size_t cached_pages(const std::string& path) {
    const meki::File file(path);
    const auto size = static_cast<std::size_t>(file.size());
    void* map = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.descriptor(), 0);
    CHECK(map != MAP_FAILED);
    std::vector<unsigned char> resident((size + 4095) / 4096);
    CHECK(::mincore(map, size, resident.data()) == 0);
    ::munmap(map, size);
    std::size_t count = 0;
    for (const unsigned char page : resident) {
        count += page & 1u;
    }
    return count;
}

void dropped_cache() {
    for (const meki::IoMode mode : modes) {
        const std::string path = directory / "cached.safetensors";
        write_rom(path, 256, 4096, 1024);
        const auto reader = open(path, mode);
        for (std::uint64_t id = 0; id < 256; ++id) {
            check_row(*reader, id);
        }
        reader->drop_page_cache();
        CHECK(cached_pages(path) == 0);
        check_row(*reader, 17);
    }
}

}  // namespace

int main() {
    modes_agree();
    runs();
    large_file();
    shrinking_file();
    damaged_row();
    failing_storage();
    dropped_cache();
}
