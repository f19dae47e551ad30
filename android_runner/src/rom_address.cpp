#include "rom_address.h"

#include <algorithm>
#include <utility>

namespace meki {

namespace {

constexpr std::uint64_t largest_product = INT64_MAX;

std::uint64_t unsigned_integer(const Json& value, const char* key, const JsonObject& parameters) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > largest_product) {
        parameters.fail("'" + std::string(key) + "' has the element " + value.dump() +
                        ", which is not an integer from 0 to 2^63 - 1");
    }
    return value.get<std::uint64_t>();
}

std::vector<std::uint64_t> unsigned_integers(const Json& list, const char* key, const JsonObject& parameters) {
    if (!list.is_array()) {
        parameters.fail("'" + std::string(key) + "' has the element " + list.dump() + ", which is not a list");
    }
    std::vector<std::uint64_t> parsed;
    for (const Json& value : list) {
        parsed.push_back(unsigned_integer(value, key, parameters));
    }
    return parsed;
}

void check_heads(const NgramHash& hash, const JsonObject& parameters, std::uint64_t num_rows) {
    const auto has_no_head = [](const std::vector<std::uint64_t>& heads) { return heads.empty(); };
    if (hash.primes.empty() || hash.multipliers.size() != hash.primes.size() + 1 ||
        std::any_of(hash.primes.begin(), hash.primes.end(), has_no_head)) {
        parameters.fail("the hash needs one multiplier more than orders, and a head in every order");
    }
    std::uint64_t addressed = 0;
    for (const auto& heads : hash.primes) {
        for (const std::uint64_t prime : heads) {
            if (prime < 2) {
                parameters.fail("a hash head has fewer than 2 rows");
            }
            if (prime > num_rows - addressed) {  // the sum itself may overflow
                parameters.fail("the hash addresses more rows than the " + std::to_string(num_rows) + " of the file");
            }
            addressed += prime;
        }
    }
    if (addressed != num_rows) {
        parameters.fail("the hash addresses " + std::to_string(addressed) + " rows, the file has " +
                        std::to_string(num_rows));
    }
}

void check_products(const NgramHash& hash, const JsonObject& parameters) {
    if (hash.token_map.empty()) {
        parameters.fail("'token_map' is empty");
    }
    const auto [least, most] = std::minmax_element(hash.token_map.begin(), hash.token_map.end());
    if (*least < 0) {
        parameters.fail("compressed ids must not be negative");
    }
    const std::uint64_t largest_id = std::max({static_cast<std::uint64_t>(*most), hash.pad_id, std::uint64_t{1}});
    for (const std::uint64_t multiplier : hash.multipliers) {
        if (multiplier == 0) {
            parameters.fail("multipliers must be positive");
        }
        if (multiplier > largest_product / largest_id) {
            parameters.fail("a multiplier times a compressed id overflows 64 bits");
        }
    }
}

}  // namespace

std::unique_ptr<Address> make_ragged(const JsonObject& parameters, std::vector<std::int64_t> offsets,
                                     std::uint64_t num_rows) {
    const auto descends = [](std::int64_t left, std::int64_t right) { return right <= left; };
    if (offsets.size() < 2 || offsets.front() != 0 || static_cast<std::uint64_t>(offsets.back()) != num_rows ||
        std::adjacent_find(offsets.begin(), offsets.end(), descends) != offsets.end()) {
        parameters.fail("'offsets' does not divide the " + std::to_string(num_rows) + " rows among the tokens");
    }
    auto address = std::make_unique<RaggedAddress>(std::move(offsets));
    if (parameters.count("rows_per_token") != address->rows_per_token()) {
        parameters.fail("rows_per_token is " + std::to_string(parameters.count("rows_per_token")) +
                        ", the offsets say " + std::to_string(address->rows_per_token()));
    }
    return address;
}

std::unique_ptr<Address> make_ngram_hash(const JsonObject& parameters, std::vector<std::int32_t> token_map,
                                         std::uint64_t num_rows) {
    NgramHash hash{std::move(token_map),
                   unsigned_integers(parameters.list("multipliers"), "multipliers", parameters),
                   {},
                   parameters.count("pad_id")};
    for (const Json& heads : parameters.list("primes")) {
        hash.primes.push_back(unsigned_integers(heads, "primes", parameters));
    }
    check_heads(hash, parameters, num_rows);
    check_products(hash, parameters);
    return std::make_unique<NgramHashAddress>(std::move(hash));
}

}  // namespace meki
