// The ways to read rows that the probe compares.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "address.h"

namespace meki {

// One way to read runs of rows; used by one thread.
class Method {
public:
    virtual ~Method() = default;
    virtual void read(const RowRun& run) = 0;
    // Lets go of pages, so that the page cache can drop them.
    virtual void release() {}
};

struct NamedMethod {
    const char* name;
    std::function<std::unique_ptr<Method>(const std::string& path)> open;
};

// All of them; see io_probe.h.
const std::vector<NamedMethod>& named_methods();

// Whether the file system of this ROM file has O_DIRECT.
bool supports_direct(const std::string& path);

}  // namespace meki
