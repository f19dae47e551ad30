#include "strict_json.h"

#include <algorithm>
#include <utility>

#include "error.h"

namespace meki {

namespace {

constexpr int max_depth = 16;
constexpr std::size_t max_quoted = 80;

std::string quote(const Json& value) {
    std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
    return text.size() > max_quoted ? text.substr(0, max_quoted) + "…" : text;
}

}  // namespace

Json parse_json(const std::string& text, const std::string& where, const std::string& fix) {
    const auto limit_depth = [&](int depth, Json::parse_event_t, Json&) {
        if (depth > max_depth) {
            throw Error("not valid JSON: nested deeper than " + std::to_string(max_depth) + " levels", where, fix);
        }
        return true;
    };
    if (text.find('\0') != std::string::npos) {  // where the parser takes the text to end
        throw Error("not valid JSON: it holds a zero byte", where, fix);
    }
    try {
        return Json::parse(text, limit_depth);
    } catch (const Json::exception& error) {
        throw Error(std::string("not valid JSON: ") + error.what(), where, fix);
    }
}

JsonObject::JsonObject(const Json& value, std::string where, std::string fix)
    : value_(value), where_(std::move(where)), fix_(std::move(fix)) {
    if (!value_.is_object()) {
        fail("expected a JSON object, got " + quote(value_));
    }
}

void JsonObject::allow_only(std::initializer_list<const char*> keys) const {
    for (const auto& [key, unused] : value_.items()) {
        if (std::none_of(keys.begin(), keys.end(), [&name = key](const char* known) { return name == known; })) {
            std::string known;
            for (const char* name : keys) {
                known += (known.empty() ? "" : ", ") + std::string(name);
            }
            fail("unknown key '" + key + "' (known keys: " + known + ")");
        }
    }
}

const Json& JsonObject::at(const char* key) const {
    const auto found = value_.find(key);
    if (found == value_.end()) {
        fail(std::string("the key '") + key + "' is missing");
    }
    return *found;
}

JsonObject JsonObject::object(const char* key) const { return {at(key), where_ + ": " + key, fix_}; }

const Json& JsonObject::list(const char* key) const {
    if (!at(key).is_array()) {
        wrong_type(key, "a list");
    }
    return at(key);
}

std::string JsonObject::text(const char* key) const {
    if (!at(key).is_string()) {
        wrong_type(key, "a string");
    }
    return at(key).get<std::string>();
}

double JsonObject::number(const char* key) const {
    if (!at(key).is_number()) {
        wrong_type(key, "a number");
    }
    return at(key).get<double>();
}

std::int64_t JsonObject::integer(const char* key) const {
    const Json& value = at(key);
    const bool too_large = value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{INT64_MAX};
    if (!value.is_number_integer() || too_large) {
        wrong_type(key, "an integer");
    }
    return value.get<std::int64_t>();
}

std::uint64_t JsonObject::count(const char* key, std::uint64_t minimum) const {
    const std::int64_t value = integer(key);
    if (value < 0 || static_cast<std::uint64_t>(value) < minimum) {
        fail(std::string("'") + key + "' is " + std::to_string(value) + ", less than " + std::to_string(minimum));
    }
    return static_cast<std::uint64_t>(value);
}

void JsonObject::fail(const std::string& what) const { throw Error(what, where_, fix_); }

void JsonObject::wrong_type(const char* key, const char* expected) const {
    fail(std::string("'") + key + "' must be " + expected + ", got " + quote(at(key)));
}

}  // namespace meki
