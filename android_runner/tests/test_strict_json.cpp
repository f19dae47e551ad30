#include "strict_json.h"

#include "check.h"

int main() {
    using meki::Json;
    using meki::JsonObject;
    const Json value = meki::parse_json(R"({"n": 3, "x": 1.5, "s": "t", "l": [1], "o": {"k": -1}, "b": true,
        "big": 18446744073709551615})", "file", "fix it");
    const JsonObject object(value, "file", "fix it");
    CHECK(object.count("n") == 3 && object.integer("n") == 3 && object.number("n") == 3.0);
    CHECK(object.number("x") == 1.5 && object.text("s") == "t" && object.list("l").size() == 1);
    CHECK(object.object("o").integer("k") == -1);
    CHECK_ERROR(object.integer("x"), "'x' must be an integer, got 1.5 [file] fix it");
    CHECK_ERROR(object.integer("b"), "'b' must be an integer, got true");
    CHECK_ERROR(object.integer("big"), "'big' must be an integer");
    CHECK_ERROR(object.number("b"), "'b' must be a number");
    CHECK_ERROR(object.text("n"), "'n' must be a string");
    CHECK_ERROR(object.list("o"), "'o' must be a list");
    CHECK_ERROR(object.object("l"), "expected a JSON object, got [1] [file: l]");
    CHECK_ERROR(object.at("missing"), "the key 'missing' is missing");
    CHECK_ERROR(object.count("n", 4), "'n' is 3, less than 4");
    CHECK_ERROR(object.object("o").count("k"), "'k' is -1, less than 0");
    CHECK_ERROR(object.allow_only({"n", "x"}), "unknown key 'b' (known keys: n, x)");
    CHECK_ERROR(meki::parse_json("{", "file", ""), "not valid JSON");
    CHECK_ERROR(meki::parse_json("\"\xc3\"", "file", ""), "not valid JSON");
    CHECK_ERROR(meki::parse_json(std::string("{}\0{", 4), "file", ""), "it holds a zero byte");
    CHECK_ERROR(meki::parse_json(std::string(1000000, '['), "file", ""), "nested deeper");
}
