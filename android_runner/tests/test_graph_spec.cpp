// graph_spec.json, strictly: what does not fit the contract is named.

#include "graph_spec.h"

#include <functional>

#include "temporary.h"

namespace {

using nlohmann::json;

const TemporaryDirectory directory;

json tensor(const std::string& role, const json& shape, int index = 0) {
    return {{"name", role + "_" + std::to_string(index)}, {"role", role}, {"dtype", "float32"}, {"shape", shape},
            {"index", index}};
}

json graph(const std::string& file, int tokens) {
    json inputs = {tensor("input_embeds", {1, tokens, 6}), tensor("attention_mask", {1, 1, tokens, 8 + tokens}),
                   tensor("position_cos", {1, tokens, 2}), tensor("position_sin", {1, tokens, 2}),
                   tensor("memory_rows", {1, tokens, 5})};
    json outputs = {tensor("logits", {1, tokens, 20})};
    for (int layer = 0; layer < 2; ++layer) {
        inputs.push_back(tensor("past_key", {1, 1, 4, 8}, layer));
        inputs.push_back(tensor("past_value", {1, 1, 8, 4}, layer));
        outputs.push_back(tensor("present_key", {1, 1, 4, tokens}, layer));
        outputs.push_back(tensor("present_value", {1, 1, tokens, 4}, layer));
    }
    return {{"file", file}, {"num_tokens", tokens}, {"inputs", inputs}, {"outputs", outputs}};
}

json row_file(const std::string& file, int row_dim) {
    return {{"file", file}, {"row_dim", row_dim}, {"addressing", "identity"}, {"rows_per_token", 1}};
}

json good_spec() {
    return {{"schema", 1}, {"vocab_size", 20}, {"hidden_size", 6}, {"num_hidden_layers", 2},
            {"num_key_value_heads", 1}, {"head_dim", 4}, {"rope_theta", 10000.0}, {"context_length", 8},
            {"mask_value", -100.0}, {"eos_token_id", nullptr}, {"prefill", graph("prefill.onnx", 3)},
            {"decode", graph("decode.onnx", 1)}, {"embedding", row_file("embedding", 6)},
            {"roms", json::array({row_file("rom", 5)})}};
}

std::string write(const json& spec) {
    const std::string path = directory / "graph_spec.json";
    write_file(path, spec.dump());
    return path;
}

void rejects(const std::function<void(json&)>& edit, const char* what) {
    json spec = good_spec();
    edit(spec);
    CHECK_ERROR(meki::read_graph_spec(write(spec)), what);
}

}  // namespace

int main() {
    const meki::GraphSpec spec = meki::read_graph_spec(write(good_spec()));
    CHECK(spec.prefill.num_tokens == 3 && spec.prefill.file == "prefill.onnx" && spec.mask_value == -100.0f);
    CHECK(spec.decode.input("past_key", 1).name == "past_key_1");
    CHECK(spec.prefill.output("present_value", 1).num_elements() == 12);
    CHECK(spec.roms.size() == 1 && spec.roms[0].row_dim == 5);

    rejects([](json& s) { s["schema"] = 2; }, "schema 2, this version reads 1");
    rejects([](json& s) { s["extra"] = 1; }, "unknown key 'extra'");
    rejects([](json& s) { s.erase("head_dim"); }, "the key 'head_dim' is missing");
    rejects([](json& s) { s["vocab_size"] = 0; }, "'vocab_size' is 0, less than 1");
    rejects([](json& s) { s["context_length"] = std::uint64_t{1} << 40; }, "more than this reader's limit");
    rejects([](json& s) { s["rope_theta"] = 0; }, "'rope_theta' is not positive");
    rejects([](json& s) { s["embedding"]["row_dim"] = 7; }, "the embedding has 7 elements a row");
    rejects([](json& s) { s["num_hidden_layers"] = 3; }, "there are 9 inputs, expected 11");
    rejects([](json& s) { s["num_hidden_layers"] = 1000000000; }, "inputs, expected");
    rejects([](json& s) { s["roms"] = json::array(); }, "there are 9 inputs, expected 8");
    rejects([](json& s) { s["decode"] = graph("decode.onnx", 2); }, "the decode graph takes 2 tokens a call");
    rejects([](json& s) { s["decode"]["inputs"][0]["dtype"] = "float16"; }, "dtype is 'float16'");
    rejects([](json& s) { s["decode"]["inputs"][0]["shape"] = {1, 1, 7}; }, "input input_embeds[0] has shape [1,1,7]");
    rejects([](json& s) { s["decode"]["inputs"][0]["role"] = "input_ids"; }, "the input input_embeds[0] is missing");
    rejects([](json& s) { s["prefill"]["outputs"][2]["index"] = 1; }, "the output present_value[0] is missing");
    rejects([](json& s) { s["prefill"]["outputs"][0]["shape"] = {1, -3, 20}; }, "not a list of sizes");
    rejects([](json& s) { s["prefill"]["outputs"][0]["shape"] = {std::uint64_t{1} << 33, std::uint64_t{1} << 33}; },
            "not a list of sizes that fit in memory");
    write_file(directory / "graph_spec.json", "not json");
    CHECK_ERROR(meki::read_graph_spec(directory / "graph_spec.json"), "not valid JSON");
    CHECK_ERROR(meki::read_graph_spec(directory / "absent.json"), "cannot open the file");
}
