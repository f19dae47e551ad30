#include "address.h"

#include <algorithm>
#include <utility>

namespace meki {

std::size_t IdentityAddress::locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const {
    runs[0] = {sequence[position], 1};
    return 1;
}

RaggedAddress::RaggedAddress(std::vector<std::int64_t> offsets) : offsets_(std::move(offsets)) {
    for (std::size_t token = 0; token + 1 < offsets_.size(); ++token) {
        rows_per_token_ = std::max(rows_per_token_, static_cast<std::size_t>(offsets_[token + 1] - offsets_[token]));
    }
}

std::size_t RaggedAddress::locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const {
    const std::int64_t* own = offsets_.data() + sequence[position];
    runs[0] = {static_cast<std::uint64_t>(own[0]), static_cast<std::size_t>(own[1] - own[0])};
    return 1;
}

NgramHashAddress::NgramHashAddress(NgramHash hash) : hash_(std::move(hash)) {
    for (const auto& heads : hash_.primes) {
        rows_per_token_ += heads.size();
    }
}

std::size_t NgramHashAddress::locate(const std::uint32_t* sequence, std::size_t position, RowRun* runs) const {
    std::size_t count = 0;
    std::uint64_t offset = 0;
    std::uint64_t mix = term(sequence, position, 0);
    for (std::size_t order = 0; order < hash_.primes.size(); ++order) {
        mix ^= term(sequence, position, order + 1);
        for (const std::uint64_t prime : hash_.primes[order]) {
            runs[count++] = {mix % prime + offset, 1};
            offset += prime;
        }
    }
    return count;
}

std::uint64_t NgramHashAddress::term(const std::uint32_t* sequence, std::size_t position, std::size_t lag) const {
    const std::uint64_t id = lag > position
                                 ? hash_.pad_id
                                 : static_cast<std::uint64_t>(hash_.token_map[sequence[position - lag]]);
    return id * hash_.multipliers[lag];
}

}  // namespace meki
