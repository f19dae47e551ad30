#include "cores.h"

#include <algorithm>
#include <fstream>
#include <sched.h>

namespace meki {

namespace {

constexpr int max_cores = CPU_SETSIZE;

}  // namespace

std::vector<int> big_cores(const std::string& cpus) {
    std::vector<std::pair<int, long>> capacities;
    for (int core = 0; core < max_cores; ++core) {
        long capacity = 0;
        if (std::ifstream(cpus + "/cpu" + std::to_string(core) + "/cpu_capacity") >> capacity) {
            capacities.push_back({core, capacity});
        }
    }
    std::vector<int> big;
    if (capacities.empty()) {
        return big;
    }
    const auto lower = [](const auto& left, const auto& right) { return left.second < right.second; };
    const long lowest = std::min_element(capacities.begin(), capacities.end(), lower)->second;
    for (const auto& [core, capacity] : capacities) {
        if (capacity > lowest) {
            big.push_back(core);
        }
    }
    return big;
}

std::vector<int> run_on(const std::vector<int>& cores) {
    cpu_set_t allowed, wanted;
    CPU_ZERO(&wanted);
    std::vector<int> chosen;
    if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        return chosen;
    }
    for (const int core : cores) {
        if (core >= 0 && core < max_cores && CPU_ISSET(core, &allowed)) {
            CPU_SET(core, &wanted);
            chosen.push_back(core);
        }
    }
    if (!chosen.empty() && ::sched_setaffinity(0, sizeof wanted, &wanted) != 0) {
        chosen.clear();
    }
    return chosen;
}

OnCores::OnCores(const std::vector<int>& cores)
    : changed_(::sched_getaffinity(0, sizeof before_, &before_) == 0 && !run_on(cores).empty()) {}

OnCores::~OnCores() {
    if (changed_) {
        ::sched_setaffinity(0, sizeof before_, &before_);
    }
}

}  // namespace meki
