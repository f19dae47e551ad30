// Which rows of a ROM file a token needs: integers only, the same as in meki_edge/rom/addressing.py.
//
// identity: row t. ragged: a number of consecutive rows that differs from token to token. ngram_hash:
// one row a hash head, from the last N token ids. Addresses are pure functions of token ids, so they
// are known the moment a token is sampled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace meki {

// `count` consecutive rows, of which the first is `first`: one read.
struct RowRun {
    std::uint64_t first;
    std::size_t count;
};

class Address {
public:
    virtual ~Address() = default;

    virtual const char* kind() const = 0;
    // Token ids that have rows: 0 … num_tokens - 1.
    virtual std::uint64_t num_tokens() const = 0;
    // The most rows that a token needs (K).
    virtual std::size_t rows_per_token() const = 0;
    // The most runs that they come in, and the most rows of one run.
    virtual std::size_t runs_per_token() const = 0;
    virtual std::size_t rows_per_run() const = 0;
    // How many earlier ids an address depends on.
    virtual std::size_t history() const = 0;

    // The rows of token `sequence[position]`, in order, into `runs` [runs_per_token]; returns the number
    // of runs. What lies before position 0 is before the text. All ids must have rows.
    virtual std::size_t locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const = 0;
};

class IdentityAddress final : public Address {
public:
    static constexpr const char* name = "identity";

    explicit IdentityAddress(std::uint64_t num_rows) : num_rows_(num_rows) {}

    const char* kind() const override { return name; }
    std::uint64_t num_tokens() const override { return num_rows_; }
    std::size_t rows_per_token() const override { return 1; }
    std::size_t runs_per_token() const override { return 1; }
    std::size_t rows_per_run() const override { return 1; }
    std::size_t history() const override { return 0; }
    std::size_t locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const override;

private:
    std::uint64_t num_rows_;
};

// Token t has the rows offsets[t] … offsets[t + 1] - 1.
class RaggedAddress final : public Address {
public:
    static constexpr const char* name = "ragged";

    // `offsets` [V + 1] ascend from 0 to the file's number of rows, which nobody checks here.
    explicit RaggedAddress(std::vector<std::int64_t> offsets);

    const char* kind() const override { return name; }
    std::uint64_t num_tokens() const override { return offsets_.size() - 1; }
    std::size_t rows_per_token() const override { return rows_per_token_; }
    std::size_t runs_per_token() const override { return 1; }
    std::size_t rows_per_run() const override { return rows_per_token_; }
    std::size_t history() const override { return 0; }
    std::size_t locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const override;

private:
    std::vector<std::int64_t> offsets_;
    std::size_t rows_per_token_ = 0;
};

// Order n = 2 … N hashes mix = XOR over k < n of x[i - k] · multipliers[k], where x are the compressed
// ids. Head j of that order reads row mix mod primes[n - 2][j] + the sum of all primes before that one.
struct NgramHash {
    std::vector<std::int32_t> token_map;  // [V], compressed ids
    std::vector<std::uint64_t> multipliers;  // [N]
    std::vector<std::vector<std::uint64_t>> primes;  // [N - 1][heads]
    std::uint64_t pad_id;  // the compressed id before the text begins
};

class NgramHashAddress final : public Address {
public:
    static constexpr const char* name = "ngram_hash";

    // Products of a multiplier and a compressed id must fit 63 bits, which nobody checks here.
    explicit NgramHashAddress(NgramHash hash);

    const char* kind() const override { return name; }
    std::uint64_t num_tokens() const override { return hash_.token_map.size(); }
    std::size_t rows_per_token() const override { return rows_per_token_; }
    std::size_t runs_per_token() const override { return rows_per_token_; }
    std::size_t rows_per_run() const override { return 1; }
    std::size_t history() const override { return hash_.multipliers.size() - 1; }
    std::size_t locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const override;

private:
    // The compressed id `lag` places before `position`, times its multiplier.
    std::uint64_t term(const std::uint32_t* sequence, std::size_t position, std::size_t lag) const;

    NgramHash hash_;
    std::size_t rows_per_token_ = 0;
};

}  // namespace meki
