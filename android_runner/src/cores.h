// Which processor cores to run on: a phone has slow ones that would hold up the others.
#pragma once

#include <sched.h>
#include <string>
#include <vector>

namespace meki {

// Where the kernel describes them.
constexpr const char* cpu_directory = "/sys/devices/system/cpu";

// The cores whose capacity, as the kernel tells it below `cpus`, is above the
// lowest, ascending. Empty where all are alike or the kernel says nothing.
std::vector<int> big_cores(const std::string& cpus);

// Keeps this thread, and those that it starts from now on, to those of `cores` that it may run on. Returns
// them; changes nothing where there are none.
std::vector<int> run_on(const std::vector<int>& cores);

// `run_on` for as long as this lives. Then the thread is where it was before; threads that it started meanwhile stay.
class OnCores {
public:
    explicit OnCores(const std::vector<int>& cores);
    ~OnCores();
    OnCores(const OnCores&) = delete;
    OnCores& operator=(const OnCores&) = delete;

private:
    cpu_set_t before_;
    bool changed_;
};

}  // namespace meki
