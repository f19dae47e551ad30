// Token ids as text: decimal, separated by white space.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace meki {

// Throws Error if the file is missing, empty, or holds anything else than ids below 2^32.
std::vector<std::uint32_t> read_ids(const std::string& path);

}  // namespace meki
