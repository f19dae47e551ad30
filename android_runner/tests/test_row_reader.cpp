// The three ways to read agree, and a file that shrinks, or storage that fails, is an error in each.

#include "row_reader.h"

#include <algorithm>
#include <fcntl.h>
#include <fstream>
#include <random>
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

// 8 GiB, all hole but for rows on both sides of 2 GiB, 4 GiB and 6 GB, and the last one.
void large_file() {
    constexpr std::uint64_t num_rows = 1 << 20, stride = 8192;
    const std::string path = directory / "large.safetensors";
    write_file(path, safetensors(rom_header(num_rows, stride, 4).dump(), ""));
    CHECK(::truncate(path.c_str(), 4096 + num_rows * stride) == 0);
    const int descriptor = ::open(path.c_str(), O_WRONLY);
    std::vector<std::uint64_t> written = {0, num_rows - 1};
    for (const std::uint64_t byte : {std::uint64_t{1} << 31, std::uint64_t{1} << 32, std::uint64_t{6'000'000'000}}) {
        written.push_back((byte - 4096) / stride);  // it straddles this byte, or begins there
        written.push_back(written.back() + 1);
    }
    for (const std::uint64_t id : written) {
        const float row[4] = {rom_element(id, 0), 2, 3, rom_element(id, 3)};
        CHECK(::pwrite(descriptor, row, sizeof row, static_cast<off_t>(4096 + id * stride)) == sizeof row);
    }
    ::close(descriptor);
    for (const meki::IoMode mode : modes) {
        const auto reader = open(path, mode);
        CHECK(reader->rom().row_offset(num_rows - 1) > 8'000'000'000);
        float row[4];
        for (const std::uint64_t id : written) {
            reader->announce({id, 1});
            reader->read({id, 1}, row);
            CHECK(row[0] == rom_element(id, 0) && row[3] == rom_element(id, 3));
        }
        reader->read({num_rows / 2 + 5, 1}, row);
        CHECK(row[0] == 0 && row[3] == 0);
    }
}

// The integers of a static codec come as they are stored, and as the reals that they mean.
void static_rows() {
    const std::uint64_t shapes[][3] = {{600, 64, 32}, {50, 4096, 1000}, {41, 1000, 250}};
    for (const auto& shape : shapes) {
        const std::uint64_t num_rows = shape[0], dim = shape[2];
        const std::string path = directory / "static.safetensors";
        write_static_rom(path, num_rows, shape[1], dim);
        for (const meki::IoMode mode : modes) {
            const auto reader = open(path, mode);
            CHECK(reader->rom().quantization() != nullptr && reader->rom().raw_element_bytes() == 2);
            CHECK(*reader->rom().quantization() == (meki::Quantization{0.5f, 1000}));
            CHECK(reader->rom().delivered_bytes(meki::RowElement::raw) == 2 * dim);
            std::vector<std::uint16_t> raw(dim + 1, 0xabcd), half(dim + 1, 0xabcd);
            std::vector<float> real(dim);
            for (std::uint64_t id = 0; id < num_rows; ++id) {
                reader->read({id, 1}, meki::RowElement::raw, raw.data());
                reader->read({id, 1}, real.data());
                reader->read({id, 1}, meki::RowElement::float16, half.data());
                for (std::size_t i = 0; i < dim; ++i) {
                    const float expected = (static_cast<float>(rom_integer(id, i)) - 1000) / 2;
                    std::uint16_t expected_half = 0;
                    CHECK(meki::to_half(&expected, 1, &expected_half));
                    CHECK(raw[i] == rom_integer(id, i) && real[i] == expected && half[i] == expected_half);
                }
                CHECK(raw[dim] == 0xabcd && half[dim] == 0xabcd);
            }
        }
    }
}

// A run of rows without gaps is read straight to its place, one with gaps is put together; from the cache too.
void static_runs() {
    const std::string path = directory / "static.safetensors";
    for (const std::uint64_t stride : {20u, 32u}) {
        write_static_rom(path, 30, stride, 10);
        for (const meki::IoMode mode : modes) {
            const auto reader = meki::open_reader(meki::RomFile(path), mode, mode == meki::IoMode::mmap ? 0 : 1 << 16);
            for (int pass = 0; pass < 2; ++pass) {
                std::vector<std::uint16_t> raw(10);
                const std::size_t num_bytes = reader->read({7, 1}, meki::RowElement::raw, raw.data());
                CHECK((num_bytes == 0) == (pass == 1 && mode != meki::IoMode::mmap));
                CHECK(raw[0] == rom_integer(7, 0) && raw[9] == rom_integer(7, 9));
            }
        }
    }
}

void too_large_for_float16() {
    const std::string path = directory / "rom.safetensors";
    write_rom(path, 70000, 16, 4);
    const auto reader = open(path, meki::IoMode::pread);
    std::uint16_t half[4];
    reader->read({60000, 1}, meki::RowElement::float16, half);
    CHECK_ERROR(reader->read({65520, 1}, meki::RowElement::float16, half),
                "row 65520, layer 0 memory 0: an element is NaN or infinite, or too large for float16");
}

// float16 elements reach a float16 graph bit by bit, beside those of another codec.
void halves_as_they_are() {
    const std::string path = directory / "halves.safetensors";
    // Zeros, subnormals, the largest.
    const std::vector<std::uint16_t> first = {0x0000, 0x8000, 0x0001, 0x83ff, 0x7bff};
    const float second = 1.5f;
    const std::vector<std::uint16_t> third = {0xfbff, 0x3c00};
    nlohmann::json header = rom_header(3, 32, 1);
    nlohmann::json segments = nlohmann::json::array();
    const auto add = [&](std::size_t offset, std::size_t dim, const char* codec) {
        const std::size_t layer = segments.size();
        segments.push_back({{"layer", layer}, {"memory", 0}, {"offset", offset}, {"dim", dim}, {"codec", codec}});
    };
    add(1, first.size(), "fp16");  // nothing in a row is aligned
    add(11, 1, "fp32");
    add(16, third.size(), "fp16");
    header["__metadata__"]["segments"] = segments.dump();
    std::string data(3 * 32, '\0');
    std::memcpy(data.data() + 32 + 1, first.data(), 10);
    std::memcpy(data.data() + 32 + 11, &second, 4);
    std::memcpy(data.data() + 32 + 16, third.data(), 4);
    data[64 + 17] = 0x7c;  // row 2: infinite
    write_file(path, safetensors(header.dump(), data));
    for (const meki::IoMode mode : modes) {
        const auto reader = open(path, mode);
        std::vector<std::uint16_t> half(8);
        reader->read({1, 1}, meki::RowElement::float16, half.data());
        CHECK((half == std::vector<std::uint16_t>{0x0000, 0x8000, 0x0001, 0x83ff, 0x7bff, 0x3e00, 0xfbff, 0x3c00}));
        CHECK_ERROR(reader->read({2, 1}, meki::RowElement::float16, half.data()),
                    "row 2, layer 2 memory 0: an element is NaN or infinite");
    }
}

void checksums() {
    const std::string path = directory / "checked.safetensors";
    write_ragged_rom(path, {0, 1, 5, 7, 8}, 64, 13);
    add_checksums(path, 4 * 13);
    for (const meki::IoMode mode : modes) {
        const auto reader = meki::open_reader(meki::RomFile(path), mode, 0, true);
        std::vector<float> rows(4 * 13);
        reader->read({1, 4}, rows.data());
        CHECK(rows[3 * 13] == rom_element(4, 0));
    }
    const int descriptor = ::open(path.c_str(), O_WRONLY);
    CHECK(::pwrite(descriptor, "\x01", 1, 4096 + 3 * 64 + 51) == 1);  // still a sound float
    CHECK(::pwrite(descriptor, "\x01", 1, 4096 + 6 * 64 + 60) == 1);  // padding, which is not data
    ::close(descriptor);
    for (const meki::IoMode mode : modes) {
        const auto trusting = open(path, mode);
        const std::uint64_t cache_bytes = mode == meki::IoMode::mmap ? 0 : 1 << 16;
        const auto reader = meki::open_reader(meki::RomFile(path), mode, cache_bytes, true);
        std::vector<float> rows(4 * 13);
        trusting->read({1, 4}, rows.data());
        for (int pass = 0; pass < 2; ++pass) {  // a damaged row does not get into the cache
            CHECK_ERROR(reader->read({1, 4}, rows.data()), "row 3: the checksum does not match");
            reader->read({5, 2}, rows.data());
        }
    }
    write_rom(path, 4, 64, 13);
    CHECK_ERROR(meki::open_reader(meki::RomFile(path), meki::IoMode::pread, 0, true), "the file has no checksums");
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

// Other rows in a file: all elements of row `id` become values[id].
void overwrite(const std::string& path, const std::vector<float>& values, std::uint64_t stride, std::size_t dim) {
    std::vector<float> rows(values.size() * stride / 4);
    for (std::size_t id = 0; id < values.size(); ++id) {
        std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(id * stride / 4), dim, values[id]);
    }
    const int descriptor = ::open(path.c_str(), O_WRONLY);
    CHECK(::pwrite(descriptor, rows.data(), 4 * rows.size(), 4096) == static_cast<ssize_t>(4 * rows.size()));
    ::close(descriptor);
}

// Batches of runs, announced and read in any order, some twice, some never, some not announced or not whole: what is
// read is what the file held when its batch began, though it changes every other time.
void announced_batches() {
    constexpr std::size_t dim = 200, most = 9;
    std::mt19937 random(5);
    const auto below = [&](std::size_t limit) { return random() % limit; };
    std::vector<std::int64_t> offsets = {0};
    while (offsets.size() <= 120) {
        offsets.push_back(offsets.back() + static_cast<std::int64_t>(1 + below(most)));
    }
    for (const std::uint64_t stride : {800u, 4096u}) {
        const std::string path = directory / "batches.safetensors";
        write_ragged_rom(path, offsets, stride, dim);
        for (const int setup : {0, 1, 2, 3}) {
            const bool cached = setup == 3;
            const meki::IoMode mode = cached ? meki::IoMode::direct : modes[setup];
            const auto reader = meki::open_reader(meki::RomFile(path), mode, cached ? 20000 : 0);
            std::vector<float> values(static_cast<std::size_t>(offsets.back())), rows(most * dim);
            for (std::size_t batch = 0; batch < 60; ++batch) {
                if (batch % 2 == 0) {
                    for (std::size_t id = 0; id < values.size(); ++id) {
                        values[id] = static_cast<float>(1000 * batch + id);
                    }
                    overwrite(path, values, stride, dim);
                    if (cached || below(4) == 0) {
                        reader->drop_page_cache();  // the cache of rows would not know that the file has changed
                    }
                }
                std::vector<meki::RowRun> runs;
                for (std::size_t i = below(batch % 3 == 0 ? 5 : 150); i-- > 0;) {
                    const std::size_t token = below(offsets.size() - 1);
                    const auto first = static_cast<std::uint64_t>(offsets[token]);
                    runs.push_back({first, static_cast<std::size_t>(offsets[token + 1] - offsets[token])});
                    runs.resize(runs.size() + below(8) / 7, runs.back());  // some twice
                }
                if (batch % 7 != 0) {
                    const auto by_row = [](const meki::RowRun& a, const meki::RowRun& b) { return a.first < b.first; };
                    std::sort(runs.begin(), runs.end(), by_row);
                }
                for (const meki::RowRun& run : runs) {
                    if (below(20) > 0) {
                        reader->announce({run.first, below(20) > 0 ? run.count : 1 + below(run.count)});
                    }
                }
                // An error ends some early.
                const std::size_t end = batch % 4 == 0 ? std::min(runs.size(), below(10)) : runs.size();
                for (std::size_t i = 0; i < end; ++i) {
                    const meki::RowRun& run = runs[i];
                    if (below(20) > 0) {
                        reader->read(run, rows.data());
                        for (std::size_t j = 0; j < run.count * dim; ++j) {
                            CHECK(rows[j] == values[run.first + j / dim]);
                        }
                    }
                }
                // Ends a batch of which nothing was read, as any read does.
                reader->read({0, 1}, rows.data());
                CHECK(rows[0] == values[0]);
            }
        }
    }
}

// The calls of this process that read.
std::uint64_t num_reads() {
    std::ifstream counters("/proc/self/io");
    std::string name;
    std::uint64_t value = 0;
    while (name != "syscr:" && counters >> name >> value) {
    }
    return value;
}

// Whoever reads a row, it is read once, however often it was announced.
void announced_twice() {
    const std::string path = directory / "twice.safetensors";
    write_rom(path, 500, 4096, 4);
    const auto reader = open(path, meki::IoMode::direct);
    for (int pass = 0; pass < 5; ++pass) {
        const std::uint64_t before = num_reads();
        for (std::uint64_t announcement = 0; announcement < 1500; ++announcement) {
            reader->announce({announcement / 3, 1});
        }
        for (std::uint64_t id = 0; id < 500; ++id) {
            check_row(*reader, id);
        }
        const std::uint64_t count = num_reads() - before;
        CHECK(before == 0 || (count >= 500 && count < 550));  // with those of the counters themselves
    }
}

// More than is remembered, and runs that are too long to be read ahead.
void announced_too_much() {
    const std::string path = directory / "many.safetensors";
    constexpr std::uint64_t num_rows = 20000;
    write_rom(path, num_rows, 64, 4);
    const auto reader = open(path, meki::IoMode::direct);
    for (int pass = 0; pass < 2; ++pass) {
        for (std::uint64_t id = 0; id < num_rows; ++id) {
            reader->announce({id, 1});
        }
        for (std::uint64_t id = 0; id < num_rows; id += 1 + id % 3) {
            check_row(*reader, id);
        }
    }
    write_ragged_rom(path, {0, 1500, 3000, 4500}, 4096, 1);
    const auto long_runs = open(path, meki::IoMode::direct);
    std::vector<float> rows(1500);
    for (const std::uint64_t first : {0u, 1500u, 3000u}) {
        long_runs->announce({first, 1500});
    }
    for (const std::uint64_t first : {0u, 1500u, 3000u}) {
        long_runs->read({first, 1500}, rows.data());
        CHECK(rows[0] == rom_element(first, 0) && rows[1499] == rom_element(first + 1499, 0));
    }
}

// A file that shrinks after its rows were announced: they are whole or an error, and an error once they are announced
// again or the cache is dropped.
void shrinking_when_announced() {
    const std::string path = directory / "shrinking.safetensors";
    std::vector<float> row(1000);
    for (int round = 0; round < 30; ++round) {
        write_rom(path, 64, 4096, 1000);
        const auto reader = open(path, meki::IoMode::direct);
        const auto announce_all = [&] {
            for (std::uint64_t id = 0; id < 64; ++id) {
                reader->announce({id, 1});
            }
        };
        announce_all();
        CHECK(::truncate(path.c_str(), 4096 + 30 * 4096) == 0);
        for (std::uint64_t id = 0; id < 64; ++id) {
            try {
                check_row(*reader, id);
            } catch (const meki::Error& error) {
                CHECK(id >= 30 && std::string(error.what()).find("cannot be read whole") != std::string::npos);
            }
        }
        if (round % 2 == 0) {
            write_rom(path, 64, 4096, 1000);
            announce_all();
            CHECK(::truncate(path.c_str(), 4096 + 30 * 4096) == 0);
            reader->drop_page_cache();
        } else {
            announce_all();
        }
        for (std::uint64_t id = 0; id < 30; ++id) {
            check_row(*reader, id);
        }
        for (std::uint64_t id = 30; id < 64; ++id) {
            CHECK_ERROR(reader->read({id, 1}, row.data()), "cannot be read whole");
        }
    }
}

// The end of a reader while it reads ahead, whatever was taken.
void closed_while_reading() {
    const std::string path = directory / "closed.safetensors";
    write_rom(path, 256, 4096, 4);
    for (std::uint64_t round = 0; round < 100; ++round) {
        const auto reader = open(path, meki::IoMode::direct);
        for (std::uint64_t id = 0; id < 4 * round && id < 256; ++id) {
            reader->announce({id, 1});
        }
        for (std::uint64_t id = 0; id < round % 7; ++id) {
            check_row(*reader, 3 * id);
        }
    }
}

}  // namespace

int main() {
    modes_agree();
    runs();
    large_file();
    static_rows();
    static_runs();
    too_large_for_float16();
    halves_as_they_are();
    checksums();
    shrinking_file();
    damaged_row();
    failing_storage();
    dropped_cache();
    announced_batches();
    announced_twice();
    announced_too_much();
    shrinking_when_announced();
    closed_while_reading();
}
