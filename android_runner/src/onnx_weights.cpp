#include "onnx_weights.h"

#include <charconv>
#include <string_view>

#include "error.h"

namespace meki {

namespace {

// Field numbers of onnx.proto.
constexpr std::uint64_t model_graph = 7;
constexpr std::uint64_t graph_initializer = 5;
constexpr std::uint64_t tensor_dims = 1;
constexpr std::uint64_t tensor_data_type = 2;
constexpr std::uint64_t tensor_name = 8;
constexpr std::uint64_t tensor_external_data = 13;
constexpr std::uint64_t entry_key = 1;
constexpr std::uint64_t entry_value = 2;

enum WireType : std::uint64_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

// One field after another of a protobuf message.
class Message {
public:
    Message(std::string_view data, const std::string& where) : rest_(data), where_(where) {}

    struct Field {
        std::uint64_t number;
        std::uint64_t value;    // of a varint
        std::string_view data;  // of a string, a message or packed values
    };

    bool next(Field& field) {
        if (rest_.empty()) {
            return false;
        }
        const std::uint64_t tag = read_varint();
        field = {tag >> 3, 0, {}};
        switch (tag & 7u) {
            case varint:
                field.value = read_varint();
                break;
            case fixed64:
                take(8);
                break;
            case bytes:
                field.data = take(read_varint());
                break;
            case fixed32:
                take(4);
                break;
            default:
                fail();
        }
        return true;
    }

    std::uint64_t read_varint() {
        std::uint64_t value = 0;
        for (unsigned shift = 0; shift < 64; shift += 7) {
            const auto byte = static_cast<unsigned char>(take(1)[0]);
            value |= std::uint64_t{byte & 0x7fu} << shift;
            if (byte < 0x80) {
                return value;
            }
        }
        fail();
    }

    bool empty() const { return rest_.empty(); }

private:
    std::string_view take(std::uint64_t count) {
        if (count > rest_.size()) {
            fail();
        }
        const std::string_view taken = rest_.substr(0, static_cast<std::size_t>(count));
        rest_.remove_prefix(taken.size());
        return taken;
    }

    [[noreturn]] void fail() const {
        throw Error("not a valid ONNX file", where_, "copy the file again, or make it with `meki-edge export`");
    }

    std::string_view rest_;
    const std::string& where_;
};

std::uint64_t to_number(std::string_view text) {
    std::uint64_t number = 0;
    std::from_chars(text.data(), text.data() + text.size(), number);
    return number;
}

// A StringStringEntryProto of TensorProto.external_data.
void read_entry(std::string_view data, const std::string& where, ExternalWeight& weight) {
    std::string_view key, value;
    Message message(data, where);
    for (Message::Field field; message.next(field);) {
        if (field.number == entry_key) {
            key = field.data;
        } else if (field.number == entry_value) {
            value = field.data;
        }
    }
    if (key == "location") {
        weight.location = value;
    } else if (key == "offset") {
        weight.offset = to_number(value);
    } else if (key == "length") {
        weight.length = to_number(value);
    }
}

ExternalWeight read_tensor(std::string_view data, const std::string& where) {
    ExternalWeight weight;
    Message message(data, where);
    for (Message::Field field; message.next(field);) {
        if (field.number == tensor_dims && field.data.empty()) {
            weight.shape.push_back(static_cast<std::int64_t>(field.value));
        } else if (field.number == tensor_dims) {  // packed
            for (Message packed(field.data, where); !packed.empty();) {
                weight.shape.push_back(static_cast<std::int64_t>(packed.read_varint()));
            }
        } else if (field.number == tensor_data_type) {
            weight.data_type = static_cast<std::int32_t>(field.value);
        } else if (field.number == tensor_name) {
            weight.name = field.data;
        } else if (field.number == tensor_external_data) {
            read_entry(field.data, where, weight);
        }
    }
    return weight;
}

}  // namespace

std::vector<ExternalWeight> external_weights(const std::string& model, const std::string& where) {
    std::vector<ExternalWeight> weights;
    Message message(model, where);
    for (Message::Field field; message.next(field);) {
        if (field.number != model_graph) {
            continue;
        }
        Message graph(field.data, where);
        for (Message::Field entry; graph.next(entry);) {
            if (entry.number != graph_initializer) {
                continue;
            }
            ExternalWeight weight = read_tensor(entry.data, where);
            if (!weight.location.empty()) {
                weights.push_back(std::move(weight));
            }
        }
    }
    return weights;
}

}  // namespace meki
