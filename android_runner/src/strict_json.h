// Strict JSON: an unknown key, a missing key or a value of the wrong type is an error that names it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>

namespace meki {

using Json = nlohmann::json;

// Throws Error if `text` is not JSON, or is nested deeper than anything this program reads.
Json parse_json(const std::string& text, const std::string& where, const std::string& fix);

// A JSON object whose fields are read by name and type.
class JsonObject {
public:
    // Throws Error unless `value` is an object. `where` and `fix` are those of every later error.
    JsonObject(const Json& value, std::string where, std::string fix);

    // Throws Error if the object has a key other than `keys`.
    void allow_only(std::initializer_list<const char*> keys) const;

    bool has(const char* key) const { return value_.contains(key); }
    const Json& at(const char* key) const;
    JsonObject object(const char* key) const;
    const Json& list(const char* key) const;
    std::string text(const char* key) const;
    double number(const char* key) const;
    std::int64_t integer(const char* key) const;
    // An integer of at least `minimum`, which must not be negative.
    std::uint64_t count(const char* key, std::uint64_t minimum = 0) const;

    [[noreturn]] void fail(const std::string& what) const;
    const std::string& where() const { return where_; }
    const std::string& fix() const { return fix_; }

private:
    [[noreturn]] void wrong_type(const char* key, const char* expected) const;

    const Json& value_;
    std::string where_;
    std::string fix_;
};

}  // namespace meki
