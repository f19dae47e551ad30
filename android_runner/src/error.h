// The one error that is a user's to mend: what is wrong (with values), where (file, field), and what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace meki {

class Error : public std::runtime_error {
public:
    Error(const std::string& what, const std::string& where, const std::string& fix)
        : std::runtime_error(what + " [" + where + "] " + fix) {}
};

}  // namespace meki
