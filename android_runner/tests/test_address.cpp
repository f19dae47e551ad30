// Row ids, against numbers worked out by hand and to the last of 63 bits.

#include "address.h"

#include "check.h"

namespace {

using Ids = std::vector<std::uint32_t>;

std::vector<std::uint64_t> rows_of(const meki::Address& address, const Ids& sequence, std::size_t position) {
    std::vector<meki::RowRun> runs(address.runs_per_token());
    runs.resize(address.locate(sequence.data(), position, runs.data()));
    std::vector<std::uint64_t> rows;
    for (const meki::RowRun& run : runs) {
        CHECK(run.count >= 1 && run.count <= address.rows_per_run());
        for (std::size_t i = 0; i < run.count; ++i) {
            rows.push_back(run.first + i);
        }
    }
    CHECK(rows.size() <= address.rows_per_token());
    return rows;
}

using Rows = std::vector<std::uint64_t>;

void identity() {
    const meki::IdentityAddress address(10);
    CHECK(address.num_tokens() == 10 && address.rows_per_token() == 1 && address.history() == 0);
    CHECK(rows_of(address, {4, 9}, 1) == Rows{9});
}

void ragged() {
    constexpr std::int64_t far = std::int64_t{1} << 40;
    const meki::RaggedAddress address({0, 3, 4, far, far + 2});
    CHECK(address.num_tokens() == 4 && address.runs_per_token() == 1);
    CHECK(address.rows_per_token() == static_cast<std::size_t>(far - 4));
    CHECK(rows_of(address, {0, 1}, 0) == (Rows{0, 1, 2}));
    CHECK(rows_of(address, {0, 1}, 1) == Rows{3});
    CHECK(rows_of(address, {3}, 0) == (Rows{far, far + 1}));
}

void hashed() {
    // 11 · 2 = 22, 22 ^ 13 · 1 = 27, 27 ^ 17 · 3 = 40; before the text every compressed id is 3.
    const meki::NgramHashAddress address({{2, 1, 3}, {11, 13, 17}, {{5, 7}, {19}}, 3});
    CHECK(address.num_tokens() == 3 && address.rows_per_token() == 3 && address.history() == 2);
    CHECK(rows_of(address, {2, 1, 0}, 2) == (Rows{27 % 5, 5 + 27 % 7, 12 + 40 % 19}));
    CHECK(rows_of(address, {0}, 0) == (Rows{(22 ^ 39) % 5, 5 + (22 ^ 39) % 7, 12 + (22 ^ 39 ^ 51) % 19}));
    CHECK(rows_of(address, {1, 0}, 1) == (Rows{27 % 5, 5 + 27 % 7, 12 + (27 ^ 51) % 19}));

    constexpr std::uint64_t largest = INT64_MAX, prime = (std::uint64_t{1} << 61) - 1;
    const meki::NgramHashAddress wide({{0, 1}, {largest, largest}, {{prime, 3}}, 1});
    CHECK(rows_of(wide, {0}, 0) == (Rows{largest % prime, prime + largest % 3}));
    CHECK(rows_of(wide, {1}, 0) == (Rows{0, prime}));
}

}  // namespace

int main() {
    identity();
    ragged();
    hashed();
}
