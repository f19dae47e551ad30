// graph_spec.json, strictly: what does not fit the contract is named.

#include "graph_spec.h"

#include <functional>
#include <tuple>

#include "temporary.h"

namespace {

using nlohmann::json;

const TemporaryDirectory directory;

json tensor(const std::string& role, const json& shape, int index = 0) {
    return {{"name", role + "_" + std::to_string(index)}, {"role", role}, {"dtype", "float32"}, {"shape", shape},
            {"index", index}};
}

json& first_part(json& spec, const char* graph) { return spec[graph]["parts"][0]; }

json graph(const std::string& file, int tokens, int context = 8) {
    json inputs = {tensor("input_embeds", {1, tokens, 6}), tensor("attention_mask", {1, 1, tokens, context + tokens}),
                   tensor("position_cos", {1, tokens, 2}), tensor("position_sin", {1, tokens, 2}),
                   tensor("memory_rows", {1, tokens, 5})};
    json outputs = json::array({tensor("logits", {1, tokens, 20})});
    for (int layer = 0; layer < 2; ++layer) {
        inputs.push_back(tensor("past_key", {1, 1, 4, context}, layer));
        inputs.push_back(tensor("past_value", {1, 1, context, 4}, layer));
        outputs.push_back(tensor("present_key", {1, 1, 4, tokens}, layer));
        outputs.push_back(tensor("present_value", {1, 1, tokens, 4}, layer));
    }
    const json part = {{"file", file}, {"inputs", inputs}, {"outputs", outputs}};
    return {{"num_tokens", tokens}, {"parts", json::array({part})}};
}

json row_file(const std::string& file, int row_dim) {
    return {{"file", file}, {"row_dim", row_dim}, {"addressing", "identity"}, {"rows_per_token", 1}};
}

json good_spec() {
    return {{"schema", 3}, {"vocab_size", 20}, {"hidden_size", 6}, {"num_hidden_layers", 2},
            {"num_key_value_heads", 1}, {"head_dim", 4}, {"rope_theta", 10000.0}, {"context_length", 8},
            {"mask_value", -100.0}, {"eos_token_id", nullptr}, {"prefill", graph("prefill.onnx", 3)},
            {"decode", graph("decode.onnx", 1)}, {"embedding", row_file("embedding", 6)},
            {"roms", json::array({row_file("rom", 5)})}};
}

// The same with a hashed and a ragged ROM file, and two memory states.
json mixed_spec() {
    json spec = good_spec();
    const auto more = {std::tuple("rom_1", 3, "ngram_hash"), std::tuple("rom_2", 4, "ragged")};
    for (const auto& [name, rows, addressing] : more) {
        json file = row_file(name, 2);
        file["addressing"] = addressing;
        file["rows_per_token"] = rows;
        spec["roms"].push_back(file);
    }
    for (const char* graph : {"prefill", "decode"}) {
        const int tokens = spec[graph]["num_tokens"];
        for (const json& input : {tensor("memory_rows", {1, tokens, 6}, 1), tensor("memory_rows", {1, tokens, 4, 2}, 2),
                                  tensor("memory_mask", {1, tokens, 4}, 2), tensor("memory_state", {1, 9, 6}, 0),
                                  tensor("memory_state", {1, 2, 5}, 1)}) {
            first_part(spec, graph)["inputs"].push_back(input);
        }
        first_part(spec, graph)["outputs"].push_back(tensor("present_memory_state", {1, tokens, 6}, 0));
        first_part(spec, graph)["outputs"].push_back(tensor("present_memory_state", {1, tokens, 5}, 1));
    }
    return spec;
}

std::string write(const json& spec) {
    const std::string path = directory / "graph_spec.json";
    write_file(path, spec.dump());
    return path;
}

void rejects_mixed(const std::function<void(json&)>& edit, const char* what) {
    json spec = mixed_spec();
    edit(spec);
    CHECK_ERROR(meki::read_graph_spec(write(spec)), what);
}

void mixed() {
    const meki::GraphSpec spec = meki::read_graph_spec(write(mixed_spec()));
    CHECK(spec.roms.size() == 3 && spec.roms[1].addressing == "ngram_hash" && spec.roms[2].rows_per_token == 4);
    CHECK(!spec.roms[0].masked() && !spec.roms[1].masked() && spec.roms[2].masked());
    CHECK(spec.memory_states.size() == 2 && spec.memory_states[0].length == 9 && spec.memory_states[1].dim == 5);
    const auto input = [](json& s, std::size_t index) -> json& { return first_part(s, "prefill")["inputs"][index]; };
    rejects_mixed([&](json& s) { input(s, 9)["shape"] = {1, 3, 3, 2}; },
                  "input memory_rows[1] has shape [1,3,3,2], expected [1,3,6]");
    rejects_mixed([&](json& s) { input(s, 10)["shape"] = {1, 3, 8}; }, "expected [1,3,4,2]");
    rejects_mixed([&](json& s) { input(s, 11)["role"] = "mask"; }, "the input memory_mask[2] is missing");
    rejects_mixed([&](json& s) { input(s, 12)["shape"] = {1, 8, 6}; },
                  "memory_state[0] has shape [1,8,6], expected [1,9,6]");
    rejects_mixed([](json& s) { first_part(s, "decode")["inputs"][12]["shape"] = {1, 0, 6}; },
                  "expected [1, length, dim]");
    rejects_mixed([](json& s) { first_part(s, "decode")["inputs"][12]["shape"] = {9, 6}; },
                  "expected [1, length, dim]");
    rejects_mixed([](json& s) { first_part(s, "decode")["inputs"].erase(13); }, "there are 14 inputs, expected 13");
    rejects_mixed([](json& s) { first_part(s, "prefill")["inputs"].erase(13); }, "there are 13 inputs, expected 14");
    rejects_mixed([](json& s) { first_part(s, "prefill")["outputs"][6]["shape"] = {1, 9, 5}; },
                  "output present_memory_state[1] has shape [1,9,5], expected [1,3,5]");
    rejects_mixed([](json& s) { s["roms"][2]["addressing"] = "hash"; }, "unknown addressing 'hash'");
    rejects_mixed([](json& s) { s["roms"][2]["rows_per_token"] = 0; }, "'rows_per_token' is 0, less than 1");
    rejects_mixed([](json& s) { s["embedding"]["rows_per_token"] = 2; }, "the embedding is not addressed");
    rejects_mixed([](json& s) { s["embedding"]["addressing"] = "ragged"; }, "the embedding is not addressed");
}

void rejects(const std::function<void(json&)>& edit, const char* what) {
    json spec = good_spec();
    edit(spec);
    CHECK_ERROR(meki::read_graph_spec(write(spec)), what);
}

json& tensor_of(json& spec, const char* graph, const char* kind, const std::string& role, int index = 0) {
    for (json& part : spec[graph]["parts"]) {
        for (json& found : part[kind]) {
            if (found["role"] == role && found["index"] == index) {
                return found;
            }
        }
    }
    std::exit(1);
}

void set_type(json& found, const char* dtype, const json& quantization) {
    found["dtype"] = dtype;
    found["quantization"] = quantization;
}

void types() {
    const json eight = {{"scale", 0.5}, {"zero_point", 3}};
    const auto quantize_cache = [&](json& s) {
        for (const char* graph : {"prefill", "decode"}) {
            set_type(tensor_of(s, graph, "inputs", "past_key", 1), "uint8", eight);
            set_type(tensor_of(s, graph, "outputs", "present_key", 1), "uint8", eight);
        }
    };
    json spec = good_spec();
    quantize_cache(spec);
    set_type(tensor_of(spec, "decode", "outputs", "logits"), "float16", nullptr);
    const meki::GraphSpec read = meki::read_graph_spec(write(spec));
    const auto& [length, prefill, decode] = read.longest();
    CHECK(length == 8 && decode.output("logits").type.dtype == meki::DType::float16);
    CHECK(prefill.input("past_key", 1).type.quantization == (meki::Quantization{0.5f, 3}));
    CHECK(prefill.input("past_key", 0).type == meki::ElementType());

    const auto logits = [](json& s) -> json& { return tensor_of(s, "decode", "outputs", "logits"); };
    rejects([&](json& s) { logits(s)["dtype"] = "uint8"; }, "integers need a 'quantization'");
    rejects([&](json& s) { logits(s)["quantization"] = eight; }, "floats have no 'quantization'");
    rejects([&](json& s) { set_type(logits(s), "int8", {{"scale", 0}, {"zero_point", 0}}); },
            "'scale' is not a positive");
    rejects([&](json& s) { set_type(logits(s), "int8", {{"scale", 1}, {"zero_point", 70000}}); },
            "'zero_point' is 70000");
    rejects([&](json& s) { set_type(logits(s), "int8", {{"scale", 1}}); }, "the key 'zero_point' is missing");
    rejects([&](json& s) { set_type(logits(s), "int8", {{"axis", 1}}); }, "unknown key 'axis'");
    rejects(
        [&](json& s) {
            quantize_cache(s);
            tensor_of(s, "prefill", "outputs", "present_key", 1)["quantization"]["zero_point"] = 4;
        },
        "input past_key[1] and what goes into it are not of one type");
    rejects([&](json& s) { set_type(tensor_of(s, "decode", "inputs", "past_value"), "float16", nullptr); },
            "input past_value[0] and what goes into it");
}

// `good_spec` cut before layer 1, with the head apart: three parts.
json cut_spec() {
    json spec = good_spec();
    for (const char* graph : {"prefill", "decode"}) {
        const int tokens = spec[graph]["num_tokens"];
        const json whole = spec[graph]["parts"][0];
        json parts = json::array();
        for (int layer = 0; layer < 2; ++layer) {
            json inputs = json::array(), outputs = json::array({tensor("hidden", {1, tokens, 6}, layer)});
            for (const json& input : whole["inputs"]) {
                const std::string role = input["role"];
                const bool is_kept = role == "past_key" || role == "past_value";
                if (is_kept ? input["index"] == layer : role != (layer == 0 ? "memory_rows" : "input_embeds")) {
                    inputs.push_back(input);
                }
            }
            if (layer == 1) {
                inputs.push_back(tensor("hidden", {1, tokens, 6}, 0));
            }
            for (const json& output : whole["outputs"]) {
                if (output["role"] != "logits" && output["index"] == layer) {
                    outputs.push_back(output);
                }
            }
            parts.push_back({{"file", "part"}, {"inputs", inputs}, {"outputs", outputs}});
        }
        parts.push_back({{"file", "head"},
                         {"inputs", json::array({tensor("hidden", {1, tokens, 6}, 1)})},
                         {"outputs", json::array({tensor("logits", {1, tokens, 20})})}});
        spec[graph]["parts"] = parts;
    }
    return spec;
}

void parts() {
    const meki::GraphSpec spec = meki::read_graph_spec(write(cut_spec()));
    const meki::GraphFile& decode = spec.longest().decode;
    CHECK(decode.parts.size() == 3 && decode.parts[2].file == "head");
    CHECK(decode.input("past_key", 1).name == "past_key_1" && decode.output("hidden", 1).num_elements() == 6);
    const auto rejects_cut = [](const std::function<void(json&)>& edit, const char* what) {
        json cut = cut_spec();
        edit(cut);
        CHECK_ERROR(meki::read_graph_spec(write(cut)), what);
    };
    const auto part = [](json& s, int index) -> json& { return s["decode"]["parts"][index]; };
    rejects_cut([&](json& s) { part(s, 1)["inputs"][0]["shape"] = {1, 1, 1, 8}; },
                "the input attention_mask[0] is not the same in all parts");
    rejects_cut([&](json& s) { part(s, 1)["inputs"].push_back(part(s, 1)["inputs"][0]); },
                "input attention_mask[0] is there twice");
    rejects_cut([&](json& s) { part(s, 1)["outputs"].push_back(part(s, 0)["outputs"][1]); },
                "output present_key[0] is there twice");
    rejects_cut([&](json& s) { part(s, 2)["inputs"][0]["index"] = 0; }, "head must have exactly the input hidden[1]");
    rejects_cut([&](json& s) { part(s, 2)["inputs"].push_back(tensor("hidden", {1, 1, 6}, 0)); },
                "head must have exactly the input hidden[1]");
    rejects_cut([&](json& s) { part(s, 2)["outputs"].push_back(tensor("hidden", {1, 1, 6}, 2)); },
                "head must have no output hidden");
    rejects_cut([&](json& s) { part(s, 0)["outputs"][0]["shape"] = {1, 1, 5}; },
                "part must have exactly the output hidden[0]");
    rejects_cut([&](json& s) { part(s, 2)["inputs"][0]["dtype"] = "float16"; }, "takes another type of hidden");
    rejects_cut([&](json& s) { part(s, 1)["inputs"].erase(3); }, "there are 8 inputs, expected 9");
    rejects_cut([&](json& s) { part(s, 1)["outputs"][1]["name"] = part(s, 1)["outputs"][2]["name"]; },
                "has two tensors called");
    rejects_cut([&](json& s) { part(s, 1)["outputs"][1]["name"] = part(s, 1)["inputs"][1]["name"]; },
                "has two tensors called");
    CHECK(spec.head_is_apart() && !meki::read_graph_spec(write(good_spec())).head_is_apart());
    // Each part gives hidden, so that any of them may give the logits: only the last one alone is a head apart.
    json swapped = cut_spec();
    for (const char* graph : {"prefill", "decode"}) {
        std::swap(swapped[graph]["parts"][0]["outputs"][1], swapped[graph]["parts"][2]["outputs"][0]);
    }
    CHECK(!meki::read_graph_spec(write(swapped)).head_is_apart());
    json other_type = cut_spec();
    other_type["decode"]["parts"][2]["inputs"][0]["dtype"] = other_type["decode"]["parts"][1]["outputs"][0]["dtype"] =
        "float16";
    CHECK(!meki::read_graph_spec(write(other_type)).head_is_apart());
    rejects_cut([](json& s) { s["decode"]["parts"] = json::array(); }, "there are 0 inputs");
}

// `spec` with contexts of 4 and 6 tokens before its own.
json with_shorter(json spec) {
    json shorter = json::array();
    for (const int length : {4, 6}) {
        json context = {{"context_length", length}, {"prefill", spec["prefill"]}, {"decode", spec["decode"]}};
        for (const char* graph : {"prefill", "decode"}) {
            const int tokens = context[graph]["num_tokens"];
            for (json& part : context[graph]["parts"]) {
                part["file"] = part["file"].get<std::string>() + std::to_string(length);
                for (json& input : part["inputs"]) {
                    const std::string role = input["role"];
                    if (role == "attention_mask") {
                        input["shape"][3] = length + tokens;
                    } else if (role == "past_key" || role == "past_value") {
                        input["shape"][role == "past_key" ? 3 : 2] = length;
                    }
                }
            }
        }
        shorter.push_back(context);
    }
    spec["shorter"] = shorter;
    return spec;
}

void contexts() {
    for (const json& base : {good_spec(), mixed_spec(), cut_spec()}) {
        const meki::GraphSpec spec = meki::read_graph_spec(write(with_shorter(base)));
        CHECK(spec.contexts.size() == 3 && spec.contexts[0].length == 4 && spec.contexts[1].length == 6);
        CHECK(spec.longest().length == 8 && spec.contexts[1].decode.input("past_value", 1).shape[2] == 6);
        CHECK(spec.contexts[0].prefill.parts[0].file == spec.longest().prefill.parts[0].file + "4");
        const std::size_t expected[] = {0, 0, 0, 0, 0, 1, 1, 2, 2};
        for (std::size_t length = 0; length <= 8; ++length) {
            CHECK(spec.context_for(length) == expected[length]);
        }
    }
    json none = good_spec();
    none["shorter"] = json::array();
    CHECK(meki::read_graph_spec(write(none)).contexts.size() == 1);

    const auto rejects_in = [](const json& base, const std::function<void(json&)>& edit, const char* what) {
        json spec = with_shorter(base);
        edit(spec["shorter"]);
        CHECK_ERROR(meki::read_graph_spec(write(spec)), what);
    };
    const auto rejects_shorter = [&](const std::function<void(json&)>& edit, const char* what) {
        rejects_in(good_spec(), edit, what);
    };
    const auto resized = [](json& context, int length) {
        context = {{"context_length", length}, {"prefill", graph("p", 3, length)}, {"decode", graph("d", 1, length)}};
    };
    rejects_shorter([](json& s) { std::swap(s[0], s[1]); }, "a context of 4 tokens follows one of 6: they must ascend");
    rejects_shorter([](json& s) { s[1] = s[0]; }, "a context of 4 tokens follows one of 4");
    rejects_shorter([&](json& s) { resized(s[1], 8); }, "a context of 8 tokens follows one of 8");
    rejects_shorter([&](json& s) { resized(s[1], 9); }, "a context of 8 tokens follows one of 9");
    rejects_shorter([&](json& s) { resized(s[0], 0); }, "'context_length' is 0, less than 1");
    rejects_shorter([](json& s) { s[0]["context_length"] = 5; },
                    "input attention_mask[0] has shape [1,1,3,7], expected [1,1,3,8]");
    rejects_shorter([](json& s) { s[1]["decode"]["parts"][0]["inputs"][5]["shape"] = {1, 1, 4, 8}; },
                    "input past_key[0] has shape [1,1,4,8], expected [1,1,4,6]");
    rejects_shorter([](json& s) { s[1].erase("decode"); }, "the key 'decode' is missing");
    rejects_shorter([](json& s) { s[1]["decode"] = 7; }, "shorter[1]: decode");
    rejects_shorter([](json& s) { s[0]["mask_value"] = -100; }, "unknown key 'mask_value'");
    rejects_shorter([](json& s) { s[0]["decode"]["parts"][0]["file"] = "../decode.onnx"; },
                    "'file' is '../decode.onnx'");
    rejects_shorter([](json& s) { s[0] = nullptr; }, "expected a JSON object");
    rejects_shorter([](json& s) { s = 4; }, "'shorter' must be a list");
    rejects_shorter([](json& s) { s[0]["prefill"] = graph("p", 2, 4); },
                    "the graph takes 2 tokens a call, in the longest context 3");
    rejects_shorter([](json& s) { s[0]["decode"] = graph("d", 2, 4); },
                    "the graph takes 2 tokens a call, in the longest context 1");
    const auto halves = [](json& tensor) { set_type(tensor, "float16", nullptr); };
    for (const char* graph : {"prefill", "decode"}) {
        rejects_shorter([&](json& s) { halves(tensor_of(s[1], graph, "inputs", "past_key", 1)); },
                        "the input past_key[1] of");
        rejects_shorter([&](json& s) { halves(tensor_of(s[1], graph, "outputs", "present_value", 1)); },
                        "the output present_value[1] of");
        rejects_shorter([&](json& s) { halves(tensor_of(s[0], graph, "outputs", "logits")); },
                        "the output logits[0] of");
    }
    rejects_in(mixed_spec(), [&](json& s) { halves(tensor_of(s[0], "decode", "inputs", "memory_state", 1)); },
               "the input memory_state[1] of decode.onnx4 is not that of decode.onnx");
    rejects_in(mixed_spec(), [&](json& s) { tensor_of(s[0], "decode", "inputs", "memory_state", 1)["shape"][1] = 3; },
               "memory_state[1] has shape [1,3,5], expected [1,2,5]");
    rejects_in(cut_spec(), [](json& s) { s[0]["decode"] = graph("d", 1, 4); },
               "the graph has 1 parts, in the longest context 3");
    // Rows that a part before their own takes would be read before they are there.
    rejects_in(cut_spec(),
               [](json& s) {
                   json& parts = s[0]["decode"]["parts"];
                   parts[0]["inputs"].push_back(tensor_of(s[0], "decode", "inputs", "memory_rows"));
               },
               "the input memory_rows[0] of part4 is not that of part");
    rejects_in(cut_spec(),
               [](json& s) {
                   json& inputs = s[0]["decode"]["parts"][1]["inputs"];
                   CHECK(inputs[0]["role"] == "attention_mask");
                   inputs.erase(0);
               },
               "part4 has fewer inputs than part");
}

}  // namespace

int main() {
    const meki::GraphSpec spec = meki::read_graph_spec(write(good_spec()));
    CHECK(spec.contexts.size() == 1 && spec.mask_value == -100.0f);
    const meki::Context& context = spec.longest();
    CHECK(context.length == 8 && context.prefill.num_tokens == 3);
    CHECK(context.prefill.parts[0].file == "prefill.onnx" && context.decode.input("past_key", 1).name == "past_key_1");
    CHECK(context.prefill.output("present_value", 1).num_elements() == 12);
    CHECK(spec.roms.size() == 1 && spec.roms[0].row_dim == 5);

    json edges = good_spec();
    edges["mask_value"] = -65504;
    edges["eos_token_id"] = 19;
    edges["roms"][0]["file"] = "..rom.";
    CHECK(meki::read_graph_spec(write(edges)).mask_value == -65504.0f);
    edges["mask_value"] = -50;
    CHECK(meki::read_graph_spec(write(edges)).roms[0].file == "..rom.");

    mixed();
    types();
    parts();
    contexts();

    rejects([](json& s) { s["schema"] = 2; }, "schema 2, this version reads 3");
    rejects([](json& s) { s["extra"] = 1; }, "unknown key 'extra'");
    rejects([](json& s) { s.erase("head_dim"); }, "the key 'head_dim' is missing");
    rejects([](json& s) { s["vocab_size"] = 0; }, "'vocab_size' is 0, less than 1");
    rejects([](json& s) { s["context_length"] = std::uint64_t{1} << 40; }, "more than this reader's limit");
    rejects([](json& s) { s["rope_theta"] = 0; }, "'rope_theta' is not positive");
    for (const json& value : {json(-49.9), json(0), json(100), json(-65505), json(-1e39), json(-1e300)}) {
        rejects([&](json& s) { s["mask_value"] = value; },
                ("'mask_value' is " + value.dump() + ", not a number from -65504 to -50").c_str());
    }
    rejects([](json& s) { s["mask_value"] = nullptr; }, "'mask_value' must be a number");
    for (const json& id : {json(20), json(std::uint64_t{1} << 40)}) {
        rejects([&](json& s) { s["eos_token_id"] = id; },
                ("'eos_token_id' is " + id.dump() + ", the vocabulary has 20 tokens").c_str());
    }
    rejects([](json& s) { s["eos_token_id"] = -1; }, "'eos_token_id' is -1, less than 0");
    rejects([](json& s) { s["eos_token_id"] = "end"; }, "'eos_token_id' must be an integer");
    rejects([](json& s) { s.erase("eos_token_id"); }, "the key 'eos_token_id' is missing");
    for (const char* name : {"", ".", "..", "../rom", "/etc/passwd", "sub/rom", "..\\rom"}) {
        const std::string what = "'file' is '" + std::string(name) + "', not the name of a file in the bundle's";
        rejects([&](json& s) { s["embedding"]["file"] = name; }, what.c_str());
        rejects([&](json& s) { s["roms"][0]["file"] = name; }, what.c_str());
        rejects([&](json& s) { first_part(s, "prefill")["file"] = name; }, what.c_str());
        rejects([&](json& s) { first_part(s, "decode")["file"] = name; }, what.c_str());
    }
    rejects([](json& s) { s["roms"][0]["file"] = std::string("rom\0.x", 6); }, "not the name of a file");
    rejects([](json& s) { s["embedding"]["row_dim"] = 7; }, "the embedding has 7 elements a row");
    rejects([](json& s) { s["num_hidden_layers"] = 3; }, "there are 9 inputs, expected 11");
    rejects([](json& s) { s["num_hidden_layers"] = 1000000000; }, "inputs, expected");
    rejects([](json& s) { s["roms"] = json::array(); }, "there are 9 inputs, expected 8");
    rejects([](json& s) { s["decode"] = graph("decode.onnx", 2); }, "the decode graph takes 2 tokens a call");
    rejects([](json& s) { first_part(s, "decode")["inputs"][0]["dtype"] = "float64"; }, "dtype is 'float64'");
    rejects([](json& s) { first_part(s, "decode")["inputs"][0]["shape"] = {1, 1, 7}; },
            "input input_embeds[0] has shape [1,1,7]");
    rejects([](json& s) { first_part(s, "decode")["inputs"][0]["role"] = "input_ids"; },
            "the input input_embeds[0] is missing");
    rejects([](json& s) { first_part(s, "prefill")["outputs"][2]["index"] = 1; },
            "the output present_value[1] is there twice");
    rejects([](json& s) { first_part(s, "prefill")["outputs"][0]["shape"] = {1, -3, 20}; }, "not a list of sizes");
    static constexpr std::uint64_t huge = std::uint64_t{1} << 33;
    rejects([](json& s) { first_part(s, "prefill")["outputs"][0]["shape"] = {huge, huge}; },
            "not a list of sizes that fit in memory");
    write_file(directory / "graph_spec.json", "not json");
    CHECK_ERROR(meki::read_graph_spec(directory / "graph_spec.json"), "not valid JSON");
    CHECK_ERROR(meki::read_graph_spec(directory / "absent.json"), "cannot open the file");
}
