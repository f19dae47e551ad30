// From logits to the next token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace meki {

struct SamplerConfig {
    double temperature = 0;   // 0: the most likely token
    std::size_t top_k = 0;    // 0: all
    double top_p = 1;         // 1: all
    std::uint64_t seed = 0;
};

// The most likely token; the lowest id among equals. Throws Error if a logit is NaN or none is finite.
std::uint32_t argmax(const float* logits, std::size_t size);

// Temperature, then the top_k most likely, then the smallest set of them that holds top_p of their
// probability. Equal logits rank by id. Allocates when it is made, not when it samples.
class Sampler {
public:
    Sampler(const SamplerConfig& config, std::size_t vocab_size);

    std::uint32_t sample(const float* logits);

private:
    struct Candidate {
        float logit;
        std::uint32_t id;
        double weight;
    };

    double uniform();

    SamplerConfig config_;
    std::uint64_t state_;
    std::size_t vocab_size_;
    std::vector<Candidate> candidates_;
};

}  // namespace meki
