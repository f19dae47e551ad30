// The addressing of a ROM file, from its header's parameters and its extra tensor, checked.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "address.h"
#include "strict_json.h"

namespace meki {

// Both throw Error if the parameters are wrong, or if an address lies outside the `num_rows` rows.
// `offsets` and `token_map` are the file's tensors of those names.
std::unique_ptr<Address> make_ragged(const JsonObject& parameters, std::vector<std::int64_t> offsets,
                                     std::uint64_t num_rows);
std::unique_ptr<Address> make_ngram_hash(const JsonObject& parameters, std::vector<std::int32_t> token_map,
                                         std::uint64_t num_rows);

}  // namespace meki
