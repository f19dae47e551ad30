#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "error.h"

namespace meki {

std::uint32_t argmax(const float* logits, std::size_t size) {
    // Lanes, because a single running maximum is a chain that compilers may not reorder.
    constexpr std::size_t lanes = 16;
    float best[lanes];
    int not_a_number[lanes] = {};
    std::fill(best, best + lanes, -std::numeric_limits<float>::infinity());
    std::size_t i = 0;
    for (; i + lanes <= size; i += lanes) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const float value = logits[i + lane];
            best[lane] = value > best[lane] ? value : best[lane];
            not_a_number[lane] |= value != value;
        }
    }
    for (; i < size; ++i) {
        best[0] = std::max(best[0], logits[i]);
        not_a_number[0] |= logits[i] != logits[i];
    }
    const float maximum = *std::max_element(best, best + lanes);
    if (!std::isfinite(maximum) || std::any_of(not_a_number, not_a_number + lanes, [](int flag) { return flag; })) {
        throw Error("the graph's logits are not finite numbers", "logits",
                    "check the weights and the ROM file with `meki-edge export`'s verification");
    }
    return static_cast<std::uint32_t>(std::find(logits, logits + size, maximum) - logits);
}

Sampler::Sampler(const SamplerConfig& config, std::size_t vocab_size)
    : config_(config), state_(config.seed), vocab_size_(vocab_size) {
    if (config_.temperature > 0) {
        candidates_.resize(vocab_size);
    }
}

std::uint32_t Sampler::sample(const float* logits) {
    const std::uint32_t best = argmax(logits, vocab_size_);
    if (config_.temperature <= 0) {
        return best;
    }
    for (std::size_t id = 0; id < vocab_size_; ++id) {
        candidates_[id] = {logits[id], static_cast<std::uint32_t>(id), 0};
    }
    const auto begin = candidates_.begin();
    const auto at = [begin](std::size_t index) { return begin + static_cast<std::ptrdiff_t>(index); };
    const auto ranks_lower = [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit < b.logit : a.id > b.id;
    };
    const auto ranks_higher = [&](const Candidate& a, const Candidate& b) { return ranks_lower(b, a); };

    std::size_t count = vocab_size_;
    if (config_.top_k > 0 && config_.top_k < count) {
        count = config_.top_k;
        std::nth_element(begin, at(count), candidates_.end(), ranks_higher);
        std::sort(begin, at(count), ranks_higher);
    }
    double total = 0;
    for (std::size_t i = 0; i < count; ++i) {
        candidates_[i].weight = std::exp((double{candidates_[i].logit} - double{logits[best]}) / config_.temperature);
        total += candidates_[i].weight;
    }
    std::size_t first = 0;
    if (config_.top_p < 1) {
        // A heap yields the few that are kept in order of rank, without sorting the vocabulary. They
        // gather behind the rest.
        std::make_heap(begin, at(count), ranks_lower);
        double kept = 0;
        for (first = count; first > 0 && (first == count || kept < config_.top_p * total); --first) {
            std::pop_heap(begin, at(first), ranks_lower);
            kept += candidates_[first - 1].weight;
        }
        total = kept;
    }
    double remaining = uniform() * total;
    std::size_t chosen = count - 1;
    while (chosen > first && remaining >= candidates_[chosen].weight) {
        remaining -= candidates_[chosen--].weight;
    }
    return candidates_[chosen].id;
}

// SplitMix64: a full-period generator of one multiplication chain, the same on every platform.
double Sampler::uniform() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t bits = state_;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    bits ^= bits >> 31;
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace meki
