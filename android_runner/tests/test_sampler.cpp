#include "sampler.h"

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"

namespace {

using meki::argmax;
using meki::Sampler;
using meki::SamplerConfig;

constexpr int num_draws = 20000;

// How often each token is drawn, as shares.
std::vector<double> shares(const SamplerConfig& config, const std::vector<float>& logits) {
    Sampler sampler(config, logits.size());
    std::vector<double> counts(logits.size());
    for (int i = 0; i < num_draws; ++i) {
        counts[sampler.sample(logits.data())] += 1.0 / num_draws;
    }
    return counts;
}

// Shares of `expected` weights, each within five standard deviations.
void check_shares(const SamplerConfig& config, const std::vector<float>& logits, std::vector<double> expected) {
    double total = 0;
    for (const double weight : expected) {
        total += weight;
    }
    const std::vector<double> found = shares(config, logits);
    for (std::size_t i = 0; i < found.size(); ++i) {
        const double p = expected[i] / total;
        CHECK(std::abs(found[i] - p) <= 5 * std::sqrt(p * (1 - p) / num_draws) + 1e-9);
    }
}

void greedy() {
    for (std::size_t size = 1; size < 100; ++size) {
        for (std::size_t peak = 0; peak < size; ++peak) {
            std::vector<float> logits(size, -3.0f);
            logits[peak] = 2.0f;
            CHECK(argmax(logits.data(), size) == peak);
            for (std::size_t i = peak; i < size; ++i) {
                logits[i] = 2.0f;  // the first of equals
            }
            CHECK(argmax(logits.data(), size) == peak);
            logits[size - 1 - peak] = std::numeric_limits<float>::quiet_NaN();
            CHECK_ERROR(argmax(logits.data(), size), "not finite");
        }
    }
    const std::vector<float> nothing(20, -std::numeric_limits<float>::infinity());
    CHECK_ERROR(argmax(nothing.data(), nothing.size()), "not finite");
    const std::vector<float> logits = {1, 5, 3};
    Sampler sampler({0, 2, 0.5, 7}, 3);
    for (int i = 0; i < 10; ++i) {
        CHECK(sampler.sample(logits.data()) == 1);
    }
}

void distributions() {
    const std::vector<float> logits = {0.0f, 2.0f, 1.0f, 3.0f, 1.0f};
    const auto weight = [&](std::size_t i, double temperature) { return std::exp(double{logits[i]} / temperature); };
    for (const double temperature : {0.5, 1.0, 3.0}) {
        std::vector<double> all;
        for (std::size_t i = 0; i < logits.size(); ++i) {
            all.push_back(weight(i, temperature));
        }
        check_shares({temperature, 0, 1, 1}, logits, all);
        check_shares({temperature, 9, 1, 2}, logits, all);
        check_shares({temperature, 2, 1, 3}, logits, {0, all[1], 0, all[3], 0});
        check_shares({temperature, 3, 1, 4}, logits, {0, all[1], all[2], all[3], 0});  // of equals, the lower id
    }
    // At temperature 1 the shares by rank (3, 1, 2, 4, 0) are 0.592, 0.218, 0.080, 0.080, 0.029.
    check_shares({1, 0, 0.55, 5}, logits, {0, 0, 0, 1, 0});
    check_shares({1, 0, 0.7, 6}, logits, {0, weight(1, 1), 0, weight(3, 1), 0});
    check_shares({1, 0, 0.85, 7}, logits, {0, weight(1, 1), weight(2, 1), weight(3, 1), 0});
    check_shares({1, 2, 0.7, 8}, logits, {0, 0, 0, 1, 0});  // 0.73 of what top-k left
    check_shares({1, 0, 0, 9}, logits, {0, 0, 0, 1, 0});    // at least one remains
}

void seeds() {
    const std::vector<float> logits(50, 0.0f);
    const auto draw = [&](std::uint64_t seed) {
        Sampler sampler({1, 0, 1, seed}, logits.size());
        std::vector<std::uint32_t> ids;
        for (int i = 0; i < 20; ++i) {
            ids.push_back(sampler.sample(logits.data()));
        }
        return ids;
    };
    CHECK(draw(1) == draw(1));
    CHECK(draw(1) != draw(2));
}

}  // namespace

int main() {
    greedy();
    distributions();
    seeds();
}
