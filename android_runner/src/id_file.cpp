#include "id_file.h"

#include <algorithm>
#include <charconv>

#include "error.h"
#include "file.h"

namespace meki {

namespace {

constexpr std::uint64_t max_bytes = std::uint64_t{1} << 30;
constexpr const char* white_space = " \t\r\n";

}  // namespace

std::vector<std::uint32_t> read_ids(const std::string& path) {
    const std::string text = File(path).read_text(max_bytes);
    std::vector<std::uint32_t> ids;
    std::size_t begin = text.find_first_not_of(white_space);
    while (begin != std::string::npos) {
        const std::size_t end = std::min(text.find_first_of(white_space, begin), text.size());
        std::uint32_t id = 0;
        const auto result = std::from_chars(text.data() + begin, text.data() + end, id);
        if (result.ec != std::errc() || result.ptr != text.data() + end) {
            throw Error("'" + text.substr(begin, std::min<std::size_t>(end - begin, 40)) + "' is not a token id", path,
                        "write decimal ids separated by white space");
        }
        ids.push_back(id);
        begin = text.find_first_not_of(white_space, end);
    }
    if (ids.empty()) {
        throw Error("the file holds no token ids", path, "write decimal ids separated by white space");
    }
    return ids;
}

}  // namespace meki
