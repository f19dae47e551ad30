// Rows arrive where they belong, whatever the order, the duplicates, the errors and the moment of the end.

#include "row_fetcher.h"

#include <chrono>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <set>
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

constexpr float masked = -100.0f;

meki::RowTensor make_tensor(std::size_t num_tokens = max_batch, std::size_t rows_per_token = 1) {
    return {{num_tokens, rows_per_token, dim}, masked, meki::host_allocator()};
}

// Each token has these rows, and zeros at its other places.
void check_rows(const std::vector<std::vector<std::uint64_t>>& expected, const meki::RowTensor& out) {
    const std::size_t places = out.shape().rows_per_token;
    for (std::size_t token = 0; token < out.shape().num_tokens; ++token) {
        const std::size_t count = token < expected.size() ? expected[token].size() : 0;
        CHECK(out.counts()[token] == count);
        for (std::size_t place = 0; place < places; ++place) {
            CHECK(static_cast<const float*>(out.mask())[token * places + place] == (place < count ? 0.0f : masked));
            const auto* row = static_cast<const float*>(out.row(token, place));
            for (std::size_t i = 0; i < dim; ++i) {
                CHECK(row[i] == (place < count ? rom_element(expected[token][place], i) : 0.0f));
            }
        }
    }
}

// With identity addressing.
void check_rows(const Ids& ids, const meki::RowTensor& out) {
    std::vector<std::vector<std::uint64_t>> expected;
    for (const std::uint32_t id : ids) {
        expected.push_back({id});
    }
    check_rows(expected, out);
}

void batches_with_duplicates() {
    meki::RowFetcher fetcher(open_rom(), max_batch);
    meki::RowTensor out = make_tensor();
    const Ids ids = {7, 3, 7, 499, 0, 3, 7};
    fetcher.submit(ids.data(), 0, ids.size(), out);
    const meki::FetchStats stats = fetcher.wait();
    check_rows(ids, out);
    CHECK(stats.rows_read == 4 && stats.bytes_read == 4 * dim * sizeof(float));
    // Late or in time, the one or the other.
    CHECK(stats.slack_us && stats.deadlines_missed <= 1);
    CHECK(stats.deadlines_missed == 0 ? stats.stall_us == 0 : *stats.slack_us == 0);
}

void deadlines_add_up() {
    meki::FetchStats sum;
    CHECK(!sum.slack_us);  // nothing was due
    meki::FetchStats in_time, late;
    in_time.slack_us = 70;
    late.slack_us = 0;
    late.deadlines_missed = 1;
    late.stall_us = 9;
    sum += in_time;
    CHECK(sum.slack_us == 70 && sum.deadlines_missed == 0);
    sum += late;
    sum += in_time;
    sum += meki::FetchStats{};
    CHECK(sum.slack_us == 0 && sum.deadlines_missed == 1 && sum.stall_us == 9);
}

// A token's rows are one read, wherever the batch is in the text; what is left of another token's rows, or
// of padding, is cleared.
void ragged() {
    const std::string path = directory / "ragged.safetensors";
    const std::vector<std::int64_t> offsets = {0, 1, 5, 7, 10};
    write_ragged_rom(path, offsets, 4 * dim, dim);
    for (const meki::IoMode mode : {meki::IoMode::pread, meki::IoMode::direct, meki::IoMode::mmap}) {
        meki::RowFetcher fetcher(meki::open_reader(meki::RomFile(path), mode), 5);
        meki::RowTensor out = make_tensor(5, 6);  // the graph has places for more rows than any token has
        const Ids sequence = {3, 1, 0, 1, 2, 1, 3, 0};
        fetcher.submit(sequence.data(), 1, 5, out);
        const meki::FetchStats stats = fetcher.wait();
        CHECK(stats.rows_read == 4 + 1 + 2);
        CHECK(mode == meki::IoMode::direct || stats.bytes_read == 7 * 4 * dim);
        check_rows({{1, 2, 3, 4}, {0}, {1, 2, 3, 4}, {5, 6}, {1, 2, 3, 4}}, out);
        fetcher.submit(sequence.data(), 6, 2, out);
        fetcher.wait();
        check_rows({{7, 8, 9}, {0}}, out);
        fetcher.submit(sequence.data(), 0, 4, out);
        fetcher.wait();
        check_rows({{7, 8, 9}, {1, 2, 3, 4}, {0}, {1, 2, 3, 4}}, out);
    }
}

// Hashed rows, by a hash written down here: every distinct one is read once.
void hashed() {
    const std::string path = directory / "hashed.safetensors";
    const std::vector<std::int32_t> token_map = {0, 1, 2, 1, 5};
    write_hashed_rom(path, token_map, 512, dim);
    const Ids sequence = {4, 1, 0, 3, 3, 3, 3, 2};
    const auto x = [&](std::size_t i) { return i < 2 ? 2u : static_cast<unsigned>(token_map[sequence[i - 2]]); };
    std::vector<std::vector<std::uint64_t>> expected;
    for (std::size_t i = 2; i < sequence.size() + 2; ++i) {  // two pads before the text
        const unsigned pair = (x(i) * 3) ^ (x(i - 1) * 5), triple = pair ^ (x(i - 2) * 7);
        expected.push_back({pair % 3, 3 + pair % 5, 8 + triple % 7});
    }
    for (const meki::IoMode mode : {meki::IoMode::pread, meki::IoMode::direct}) {
        meki::RowFetcher fetcher(meki::open_reader(meki::RomFile(path), mode), 8);
        for (std::size_t position = 0; position < sequence.size(); ++position) {
            for (std::size_t count = 1; count <= sequence.size() - position; ++count) {
                meki::RowTensor out = make_tensor(8, 3);
                fetcher.submit(sequence.data(), position, count, out);
                const meki::FetchStats stats = fetcher.wait();
                const auto begin = expected.begin() + static_cast<std::ptrdiff_t>(position);
                const std::vector<std::vector<std::uint64_t>> wanted(begin, begin + static_cast<std::ptrdiff_t>(count));
                check_rows(wanted, out);
                std::set<std::uint64_t> distinct;
                for (const auto& rows : wanted) {
                    distinct.insert(rows.begin(), rows.end());
                }
                CHECK(stats.rows_read == distinct.size());
            }
        }
    }
}

// A cache of any size changes where rows come from, not what they are; dropping the page cache empties it.
void cached() {
    const std::string path = directory / "cached.safetensors";
    write_ragged_rom(path, {0, 1, 5, 7, 10, 12}, 4 * dim, dim);
    const std::vector<std::vector<std::uint64_t>> rows = {{0}, {1, 2, 3, 4}, {5, 6}, {7, 8, 9}, {10, 11}};
    CHECK_ERROR(meki::open_reader(meki::RomFile(path), meki::IoMode::pread, 4 * dim), "holds no row of 400");
    for (const meki::IoMode mode : {meki::IoMode::pread, meki::IoMode::direct}) {
        for (const std::uint64_t cache_rows : {1u, 3u, 6u, 12u, 1000u}) {
            const std::uint64_t cache_bytes = cache_rows * (4 * dim + 32);
            meki::RowFetcher fetcher(meki::open_reader(meki::RomFile(path), mode, cache_bytes), 4);
            meki::RowTensor out = make_tensor(4, 4);
            Random random;
            meki::FetchStats total;
            std::uint64_t wanted = 0;
            for (int i = 0; i < 300; ++i) {
                Ids sequence(1 + random.below(4));
                std::vector<std::vector<std::uint64_t>> expected;
                std::set<std::uint64_t> distinct;
                for (std::uint32_t& id : sequence) {
                    id = random.below(5);
                    expected.push_back(rows[id]);
                    distinct.insert(rows[id].begin(), rows[id].end());
                }
                wanted += distinct.size();
                fetcher.submit(sequence.data(), 0, sequence.size(), out);
                total += fetcher.wait();
                check_rows(expected, out);
            }
            CHECK(total.rows_read + total.cache_hits == wanted);
            CHECK(cache_rows < 12 ? total.rows_read > 12 : total.rows_read == 12);
            CHECK(cache_rows == 1 || total.cache_hits > 0);
            fetcher.reader().drop_page_cache();
            const std::uint32_t id = 3;
            fetcher.submit(&id, 0, 1, out);
            CHECK(fetcher.wait().rows_read == 3);
        }
    }
}

// Two batches under way all the time, of every size, in every mode.
void under_load() {
    for (const meki::IoMode mode : {meki::IoMode::pread, meki::IoMode::direct, meki::IoMode::mmap}) {
        meki::RowFetcher fetcher(open_rom(mode), max_batch);
        Random random;
        Ids ids[2];
        meki::RowTensor out[2] = {make_tensor(), make_tensor()};
        constexpr int num_batches = 500;
        for (int batch = 0; batch <= num_batches; ++batch) {
            if (batch < num_batches) {
                Ids& next = ids[batch % 2];
                next.resize(batch % 3 == 0 ? 1 : 1 + random.below(max_batch));
                for (std::uint32_t& id : next) {
                    id = random.below(num_rows);
                }
                fetcher.submit(next.data(), 0, next.size(), out[batch % 2]);
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
    for (const meki::IoMode mode : {meki::IoMode::pread, meki::IoMode::direct}) {
        meki::RowFetcher fetcher(open_rom(mode), max_batch);
        meki::RowTensor first = make_tensor(1), second = make_tensor(1);
        const std::uint32_t good = 5, bad = num_rows;
        for (int i = 0; i < 200; ++i) {
            fetcher.submit(&bad, 0, 1, first);
            fetcher.submit(&good, 0, 1, second);
            CHECK_ERROR(fetcher.wait(), "has no row");
            fetcher.wait();
            check_rows(Ids{good}, second);
        }
        CHECK(::truncate((directory / "rom.safetensors").c_str(), 4096) == 0);
        fetcher.submit(&good, 0, 1, second);
        CHECK_ERROR(fetcher.wait(), "cannot be read whole");
    }
}

// An error in the middle of a batch, whose other rows were read ahead by then: the next batch gets rows of its own.
void errors_within_batches() {
    const std::string path = directory / "rom.safetensors";
    for (const meki::IoMode mode : {meki::IoMode::pread, meki::IoMode::direct}) {
        meki::RowFetcher fetcher(open_rom(mode), max_batch);
        meki::RowTensor out = make_tensor();
        Ids ids;
        for (std::uint32_t i = 0; i < max_batch; ++i) {
            ids.push_back(200 + 2 * i);
        }
        std::string others = rom_rows(num_rows + 1, 512, dim).substr(512);  // each row the next one
        others.replace(512 * 210, 4, "\xff\xff\xff\xff");  // NaN
        for (int i = 0; i < 30; ++i) {
            write_file(path, safetensors(rom_header(num_rows, 512, dim).dump(), others));
            fetcher.submit(ids.data(), 0, ids.size(), out);
            CHECK_ERROR(fetcher.wait(), "row 210, layer 0 memory 0: an element is NaN or infinite");
            write_rom(path, num_rows, 512, dim);
            fetcher.submit(ids.data(), 0, ids.size(), out);
            fetcher.wait();
            check_rows(ids, out);
            CHECK(::truncate(path.c_str(), 4096 + 512 * 220) == 0);
            fetcher.submit(ids.data(), 0, ids.size(), out);
            CHECK_ERROR(fetcher.wait(), "cannot be read whole");
        }
    }
}

// The end comes at every stage of a batch's life, and always comes.
void shutdown() {
    meki::RowTensor out[2] = {make_tensor(), make_tensor()};
    Ids ids(max_batch);
    Random random;
    for (int i = 0; i < 400; ++i) {
        meki::RowFetcher fetcher(open_rom(i % 2 == 0 ? meki::IoMode::pread : meki::IoMode::direct), max_batch);
        for (std::uint32_t& id : ids) {
            id = random.below(num_rows);
        }
        for (int batch = 0; batch < i / 2 % 3; ++batch) {
            fetcher.submit(ids.data(), 0, ids.size(), out[batch]);
        }
        if (i / 2 % 6 == 5) {
            fetcher.wait();
        }
    }
}

std::size_t num_threads() {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

// A token with one row starts no thread to read it ahead, a prompt no more than its rows are of use to, nor for ever.
void threads() {
    meki::RowFetcher fetcher(open_rom(meki::IoMode::direct), max_batch);
    meki::RowTensor out = make_tensor();
    Ids ids(max_batch);
    std::iota(ids.begin(), ids.end(), 7u);
    const std::size_t before = num_threads();
    const auto started = [&](std::size_t count) {
        fetcher.submit(ids.data(), 0, count, out);
        fetcher.wait();
        check_rows(Ids(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count)), out);
        return num_threads() - before;
    };
    CHECK(started(1) == 0);
    CHECK(started(3) <= 2);
    for (int i = 0; i < 20; ++i) {
        const std::size_t most = started(max_batch);
        CHECK(most >= 1 && most < max_batch && started(1) == most);
    }
}

// With a head start longer than the read, nobody waits.
void overlap() {
    meki::RowFetcher fetcher(open_rom(), max_batch);
    meki::RowTensor out = make_tensor(1);
    bool overlapped = false;
    for (std::uint32_t id = 0; id < 50 && !overlapped; ++id) {
        fetcher.submit(&id, 0, 1, out);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        overlapped = fetcher.wait().stall_us == 0;
        check_rows(Ids{id}, out);
    }
    CHECK(overlapped);
}

}  // namespace

int main() {
    batches_with_duplicates();
    deadlines_add_up();
    ragged();
    hashed();
    cached();
    under_load();
    errors();
    errors_within_batches();
    shutdown();
    threads();
    overlap();
}
