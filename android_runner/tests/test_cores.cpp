// Big cores, from directories as the kernel shows them; and threads that keep to them.

#include "cores.h"

#include <future>
#include <sched.h>
#include <sys/stat.h>
#include <thread>

#include "temporary.h"

namespace {

std::vector<int> big_cores_of(const std::vector<std::string>& capacities) {
    const TemporaryDirectory directory;
    for (std::size_t core = 0; core < capacities.size(); ++core) {
        const std::string cpu = directory / ("cpu" + std::to_string(core));
        CHECK(::mkdir(cpu.c_str(), 0755) == 0);
        if (!capacities[core].empty()) {
            write_file(cpu + "/cpu_capacity", capacities[core] + "\n");
        }
    }
    return meki::big_cores(directory / "");
}

void by_capacity() {
    CHECK(big_cores_of({"250", "250", "250", "250", "780", "780", "780", "1024"}) == (std::vector<int>{4, 5, 6, 7}));
    CHECK(big_cores_of({"1024", "446"}) == std::vector<int>{0});
    CHECK(big_cores_of({"1024", "1024"}).empty());
    CHECK(big_cores_of({"", ""}).empty());
    CHECK(big_cores_of({"unknown", "1024"}).empty());
    CHECK(big_cores_of({}).empty());
    CHECK(meki::big_cores("/nowhere").empty());
}

cpu_set_t allowed_cores() {
    cpu_set_t allowed;
    CHECK(::sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    return allowed;
}

bool keeps_to(int core) {
    const cpu_set_t allowed = allowed_cores();
    return CPU_COUNT(&allowed) == 1 && CPU_ISSET(core, &allowed);
}

int first_core() {
    const cpu_set_t allowed = allowed_cores();
    int core = 0;
    while (!CPU_ISSET(core, &allowed)) {
        ++core;
    }
    return core;
}

// The thread that starts others is back afterwards; they are not.
void for_a_while() {
    const cpu_set_t before = allowed_cores();
    const int core = first_core();
    std::promise<void> back;
    std::thread thread;
    {
        const meki::OnCores on({core});
        CHECK(keeps_to(core));
        thread = std::thread([core, &back] {
            back.get_future().wait();
            CHECK(keeps_to(core));
        });
    }
    cpu_set_t after = allowed_cores();
    CHECK(CPU_EQUAL(&before, &after));
    back.set_value();
    thread.join();
    { const meki::OnCores nowhere({}); }
    after = allowed_cores();
    CHECK(CPU_EQUAL(&before, &after));
}

void threads_inherit() {
    const int core = first_core();
    CHECK(meki::run_on({}).empty());
    CHECK(meki::run_on({CPU_SETSIZE - 1, CPU_SETSIZE, -1}).empty());
    CHECK(meki::run_on({core, CPU_SETSIZE - 1}) == std::vector<int>{core});
    std::thread([core] { CHECK(keeps_to(core)); }).join();
}

}  // namespace

int main() {
    by_capacity();
    for_a_while();
    threads_inherit();
}
