#include "options.h"

#include <charconv>
#include <cstdlib>
#include <sstream>

namespace meki {

namespace {

std::uint64_t parse_integer(const std::string& name, const std::string& text, std::uint64_t minimum,
                            std::uint64_t maximum) {
    std::uint64_t value = 0;
    const char* end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, value);
    if (result.ec != std::errc() || result.ptr != end || value < minimum || value > maximum) {
        throw UsageError(name + " takes an integer from " + std::to_string(minimum) + " to " +
                         std::to_string(maximum) + ", got '" + text + "'");
    }
    return value;
}

}  // namespace

Options::Options(const std::vector<std::string>& arguments, const std::set<std::string>& valued,
                 const std::set<std::string>& flags) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        const std::string& name = arguments[i];
        if (flags.count(name) != 0) {
            flags_.insert(name);
        } else if (valued.count(name) == 0) {
            throw UsageError("unknown option '" + name + "'");
        } else if (i + 1 == arguments.size()) {
            throw UsageError(name + " needs a value");
        } else {
            values_[name].push_back(arguments[++i]);
        }
    }
}

std::string Options::required(const std::string& name) const {
    const auto found = values_.find(name);
    if (found == values_.end()) {
        throw UsageError(name + " is missing");
    }
    return found->second.back();
}

std::string Options::text(const std::string& name, const std::string& otherwise) const {
    return values_.count(name) != 0 ? required(name) : otherwise;
}

std::uint64_t Options::integer(const std::string& name, std::uint64_t otherwise, std::uint64_t minimum,
                               std::uint64_t maximum) const {
    return values_.count(name) != 0 ? parse_integer(name, required(name), minimum, maximum) : otherwise;
}

double Options::number(const std::string& name, double otherwise, double minimum, double maximum) const {
    if (values_.count(name) == 0) {
        return otherwise;
    }
    const std::string text = required(name);
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(value >= minimum && value <= maximum)) {
        std::ostringstream message;
        message << name << " takes a number from " << minimum << " to " << maximum << ", got '" << text << "'";
        throw UsageError(message.str());
    }
    return value;
}

std::vector<std::uint64_t> Options::integers(const std::string& name, std::uint64_t maximum) const {
    std::vector<std::uint64_t> parsed;
    if (const auto found = values_.find(name); found != values_.end()) {
        for (const std::string& text : found->second) {
            parsed.push_back(parse_integer(name, text, 0, maximum));
        }
    }
    return parsed;
}

}  // namespace meki
