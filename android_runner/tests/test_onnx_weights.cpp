// External weights are found in a model written here, byte by byte; no damage does worse than an error.

#include "onnx_weights.h"

#include "check.h"

namespace {

std::string varint(std::uint64_t value) {
    std::string bytes;
    for (; value >= 0x80; value >>= 7) {
        bytes.push_back(static_cast<char>((value & 0x7fu) | 0x80u));
    }
    bytes.push_back(static_cast<char>(value));
    return bytes;
}

std::string number_field(unsigned field, std::uint64_t value) { return varint(field << 3) + varint(value); }

std::string bytes_field(unsigned field, const std::string& data) {
    return varint(field << 3 | 2u) + varint(data.size()) + data;
}

std::string entry(const std::string& key, const std::string& value) {
    return bytes_field(13, bytes_field(1, key) + bytes_field(2, value));
}

std::string model() {
    const std::string dims = number_field(1, 300) + number_field(1, 5);
    const std::string packed_dims = bytes_field(1, varint(300) + varint(5));
    const std::string location = entry("location", "w.data") + entry("offset", "8589934592") + entry("length", "6000");
    const std::string first = dims + number_field(2, 1) + bytes_field(8, "first") + location + number_field(14, 1);
    const std::string second = packed_dims + number_field(2, 10) + bytes_field(8, "second") + location;
    const std::string inside = number_field(1, 2) + number_field(2, 7) + bytes_field(8, "inside");
    const std::string graph = bytes_field(1, "a node") + bytes_field(5, first) + bytes_field(5, inside) +
                              bytes_field(5, second) + bytes_field(2, "name");
    const std::string fixed = varint(90 << 3 | 1) + std::string(8, 'x') + varint(91 << 3 | 5) + std::string(4, 'x');
    return number_field(1, 10) + fixed + bytes_field(7, graph) + bytes_field(8, "opset");
}

void all_external_weights() {
    const auto weights = meki::external_weights(model(), "model");
    CHECK(weights.size() == 2);
    CHECK(weights[0].name == "first" && weights[0].data_type == 1);
    CHECK(weights[1].name == "second" && weights[1].data_type == 10);
    for (const meki::ExternalWeight& weight : weights) {
        CHECK((weight.shape == std::vector<std::int64_t>{300, 5}));
        CHECK(weight.location == "w.data" && weight.offset == 8589934592u && weight.length == 6000);
    }
}

void damage() {
    const std::string good = model();
    const auto survives = [](const std::string& bytes) {
        try {
            meki::external_weights(bytes, "model");
        } catch (const meki::Error&) {
        }
    };
    for (std::size_t i = 0; i < good.size(); ++i) {
        survives(good.substr(0, i));
        for (const int value : {0, 0x7f, 0x80, 0xff}) {
            std::string bytes = good;
            bytes[i] = static_cast<char>(value);
            survives(bytes);
        }
    }
    CHECK_ERROR(meki::external_weights(good.substr(0, good.size() - 1), "model"), "not a valid ONNX file [model]");
    CHECK_ERROR(meki::external_weights("graph", "model"), "not a valid ONNX file");
    CHECK_ERROR(meki::external_weights(std::string(11, '\xff'), "model"), "not a valid ONNX file");
    CHECK(meki::external_weights("", "model").empty());
}

}  // namespace

int main() {
    all_external_weights();
    damage();
}
