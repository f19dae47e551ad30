// The one error that is a user's to mend: what is wrong (with values), where (file, field), and what to do.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

namespace meki {

// A message on one line, whatever a file held: no zero byte that ends it, no command to a terminal.
inline std::string one_line(std::string text) {
    const auto is_control = [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; };
    std::replace_if(text.begin(), text.end(), is_control, ' ');
    return text;
}

class Error : public std::runtime_error {
public:
    Error(const std::string& what, const std::string& where, const std::string& fix)
        : std::runtime_error(one_line(what + " [" + where + "] " + fix)) {}
};

}  // namespace meki
