// The command line and files of ids, strictly.

#include "options.h"

#include "id_file.h"
#include "temporary.h"

namespace {

template <typename Call>
bool is_usage_error(Call call) {
    try {
        call();
    } catch (const meki::UsageError&) {
        return true;
    }
    return false;
}

meki::Options parse(const std::vector<std::string>& arguments) {
    return {arguments, {"--count", "--share", "--name"}, {"--flag"}};
}

void command_line() {
    const meki::Options options = parse({"--count", "7", "--flag", "--share", "0.5", "--count", "9"});
    CHECK(options.flag("--flag") && options.integer("--count", 0, 0, 9) == 9);
    CHECK(options.integers("--count", 9) == (std::vector<std::uint64_t>{7, 9}));
    CHECK(options.number("--share", 0, 0, 1) == 0.5 && options.text("--name", "none") == "none");
    CHECK(!parse({}).flag("--flag") && parse({}).integer("--count", 3, 0, 9) == 3);
    CHECK(is_usage_error([&] { options.required("--name"); }));
    CHECK(is_usage_error([&] { options.integer("--count", 0, 0, 8); }));
    CHECK(is_usage_error([&] { options.integer("--count", 0, 10, 20); }));
    for (const char* number : {"", "-1", "+1", " 1", "1 ", "1.0", "0x10", "18446744073709551616"}) {
        CHECK(is_usage_error([&] { parse({"--count", number}).integer("--count", 0, 0, UINT64_MAX); }));
    }
    for (const char* number : {"", "x", "1x", "nan", "-0.1", "1.1", "inf"}) {
        CHECK(is_usage_error([&] { parse({"--share", number}).number("--share", 0, 0, 1); }));
    }
    CHECK(is_usage_error([] { parse({"--unknown"}); }));
    CHECK(is_usage_error([] { parse({"--name"}); }));
    CHECK(is_usage_error([] { parse({"stray"}); }));
}

void id_files() {
    const TemporaryDirectory directory;
    const std::string path = directory / "ids";
    write_file(path, "\n 1 22\t4294967295\r\n0");
    CHECK(meki::read_ids(path) == (std::vector<std::uint32_t>{1, 22, 4294967295u, 0}));
    for (const char* text : {"1,2", "4294967296", "-1", "1 x", "0x1", "1.5"}) {
        write_file(path, text);
        CHECK_ERROR(meki::read_ids(path), "is not a token id");
    }
    write_file(path, " \n");
    CHECK_ERROR(meki::read_ids(path), "holds no token ids");
}

}  // namespace

int main() {
    command_line();
    id_files();
}
