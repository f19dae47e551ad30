// The command line, strictly: an unknown option, a missing value or a bad number is a UsageError.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace meki {

struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Options {
public:
    // `arguments` follow the command; `valued` options take a value, `flags` none.
    Options(const std::vector<std::string>& arguments, const std::set<std::string>& valued,
            const std::set<std::string>& flags);

    bool flag(const std::string& name) const { return flags_.count(name) != 0; }
    std::string required(const std::string& name) const;
    std::string text(const std::string& name, const std::string& otherwise) const;
    std::uint64_t integer(const std::string& name, std::uint64_t otherwise, std::uint64_t minimum,
                          std::uint64_t maximum) const;
    // A number in [minimum, maximum].
    double number(const std::string& name, double otherwise, double minimum, double maximum) const;
    // Every value that a repeatable option was given, as integers up to `maximum`.
    std::vector<std::uint64_t> integers(const std::string& name, std::uint64_t maximum) const;

private:
    std::map<std::string, std::vector<std::string>> values_;
    std::set<std::string> flags_;
};

}  // namespace meki
