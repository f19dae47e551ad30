// Rows arrive where they belong, whatever the order, the duplicates, the errors and the moment of the end.

#include "row_fetcher.h"

#include <chrono>
#include <unistd.h>

#include "temporary.h"

namespace {

using Ids = std::vector<std::uint32_t>;

constexpr std::uint64_t num_rows = 500;
constexpr std::size_t dim = 100;
constexpr std::size_t max_batch = 64;

const TemporaryDirectory directory;

std::unique_ptr<meki::RowReader> open_rom(meki::IoMode mode = meki::IoMode::pread) {
    const std::string path = directory / "rom.safetensors";
    write_rom(path, num_rows, 512, dim);
    return meki::open_reader(meki::RomFile(path), mode);
}

// A small generator, so that the tests do the same every time.
struct Random {
    std::uint32_t state = 1;
    std::uint32_t below(std::uint32_t limit) {
        state = state * 1664525u + 1013904223u;
        return static_cast<std::uint32_t>((std::uint64_t{state} * limit) >> 32);
    }
};

void check_rows(const Ids& ids, const std::vector<float>& out) {
    for (std::size_t row = 0; row < ids.size(); ++row) {
        for (std::size_t i = 0; i < dim; ++i) {
            CHECK(out[row * dim + i] == rom_element(ids[row], i));
        }
    }
}

void batches_with_duplicates() {
    meki::RowFetcher fetcher(open_rom(), max_batch);
    std::vector<float> out(max_batch * dim);
    const Ids ids = {7, 3, 7, 499, 0, 3, 7};
    fetcher.submit(ids.data(), ids.size(), out.data());
    const meki::FetchStats stats = fetcher.wait();
    check_rows(ids, out);
    CHECK(stats.rows_read == 4 && stats.bytes_read == 4 * dim * sizeof(float));
}

// Two batches under way all the time, of every size, in every mode.
void under_load() {
    for (const meki::IoMode mode : {meki::IoMode::pread, meki::IoMode::direct, meki::IoMode::mmap}) {
        meki::RowFetcher fetcher(open_rom(mode), max_batch);
        Random random;
        Ids ids[2];
        std::vector<float> out[2] = {std::vector<float>(max_batch * dim), std::vector<float>(max_batch * dim)};
        constexpr int num_batches = 500;
        for (int batch = 0; batch <= num_batches; ++batch) {
            if (batch < num_batches) {
                Ids& next = ids[batch % 2];
                next.resize(batch % 3 == 0 ? 1 : 1 + random.below(max_batch));
                for (std::uint32_t& id : next) {
                    id = random.below(num_rows);
                }
                fetcher.submit(next.data(), next.size(), out[batch % 2].data());
            }
            if (batch > 0) {
                fetcher.wait();
                check_rows(ids[(batch - 1) % 2], out[(batch - 1) % 2]);
            }
        }
    }
}

// An error belongs to its batch: the one before and the one after are served.
void errors() {
    meki::RowFetcher fetcher(open_rom(), max_batch);
    std::vector<float> first(dim), second(dim);
    const std::uint32_t good = 5, bad = num_rows;
    for (int i = 0; i < 200; ++i) {
        fetcher.submit(&bad, 1, first.data());
        fetcher.submit(&good, 1, second.data());
        CHECK_ERROR(fetcher.wait(), "has no row");
        fetcher.wait();
        check_rows({good}, second);
    }
    CHECK(::truncate((directory / "rom.safetensors").c_str(), 4096) == 0);
    fetcher.submit(&good, 1, second.data());
    CHECK_ERROR(fetcher.wait(), "cannot be read whole");
}

// The end comes at every stage of a batch's life, and always comes.
void shutdown() {
    std::vector<float> out(2 * max_batch * dim);
    Ids ids(max_batch);
    Random random;
    for (int i = 0; i < 200; ++i) {
        meki::RowFetcher fetcher(open_rom(), max_batch);
        for (std::uint32_t& id : ids) {
            id = random.below(num_rows);
        }
        for (int batch = 0; batch < i % 3; ++batch) {
            fetcher.submit(ids.data(), ids.size(), out.data() + static_cast<std::size_t>(batch) * max_batch * dim);
        }
        if (i % 6 == 5) {
            fetcher.wait();
        }
    }
}

// With a head start longer than the read, nobody waits.
void overlap() {
    meki::RowFetcher fetcher(open_rom(), max_batch);
    std::vector<float> out(dim);
    bool overlapped = false;
    for (std::uint32_t id = 0; id < 50 && !overlapped; ++id) {
        fetcher.submit(&id, 1, out.data());
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        overlapped = fetcher.wait().stall_us == 0;
        check_rows({id}, out);
    }
    CHECK(overlapped);
}

}  // namespace

int main() {
    batches_with_duplicates();
    under_load();
    errors();
    shutdown();
    overlap();
}
