#include "graph_spec.h"

#include <algorithm>
#include <cassert>

#include "address.h"
#include "file.h"
#include "strict_json.h"

namespace meki {

namespace {

constexpr std::uint64_t max_bytes = 64 << 20;
constexpr std::uint64_t max_elements = std::uint64_t{1} << 36;  // of a tensor
constexpr std::uint64_t max_size = std::uint64_t{1} << 31;      // of an axis
constexpr const char* fix = "regenerate the directory with `meki-edge export` and `meki-edge pack`";

std::size_t size_at(const JsonObject& object, const char* key) {
    const std::uint64_t value = object.count(key, 1);
    if (value > max_size) {
        object.fail(std::string("'") + key + "' is " + std::to_string(value) + ", more than this reader's limit");
    }
    return static_cast<std::size_t>(value);
}

TensorSpec parse_tensor(const JsonObject& object) {
    object.allow_only({"name", "role", "dtype", "shape", "index"});
    if (object.text("dtype") != "float32") {
        object.fail("dtype is '" + object.text("dtype") + "': this harness runs graphs with float32 tensors");
    }
    TensorSpec tensor{object.text("name"), object.text("role"), {}, 0};
    std::uint64_t num_elements = 1;
    for (const Json& size : object.list("shape")) {
        if (!size.is_number_unsigned() || size.get<std::uint64_t>() > max_elements / num_elements) {
            object.fail("'shape' is " + object.list("shape").dump() + ", not a list of sizes that fit in memory");
        }
        tensor.shape.push_back(size.get<std::int64_t>());
        num_elements *= std::max(size.get<std::uint64_t>(), std::uint64_t{1});
    }
    if (object.has("index")) {
        tensor.index = static_cast<std::size_t>(object.count("index"));
    }
    return tensor;
}

std::vector<TensorSpec> parse_tensors(const JsonObject& graph, const char* key) {
    std::vector<TensorSpec> tensors;
    for (const Json& value : graph.list(key)) {
        const std::string where = graph.where() + "." + key + "[" + std::to_string(tensors.size()) + "]";
        tensors.push_back(parse_tensor({value, where, graph.fix()}));
    }
    return tensors;
}

GraphFile parse_graph(const JsonObject& object) {
    object.allow_only({"file", "num_tokens", "inputs", "outputs"});
    return {object.text("file"), size_at(object, "num_tokens"), parse_tensors(object, "inputs"),
            parse_tensors(object, "outputs")};
}

RowFile parse_row_file(const JsonObject& object) {
    object.allow_only({"file", "row_dim", "addressing", "rows_per_token"});
    RowFile file{object.text("file"), size_at(object, "row_dim"), object.text("addressing"),
                 size_at(object, "rows_per_token")};
    const auto known = {IdentityAddress::name, RaggedAddress::name, NgramHashAddress::name};
    if (std::find(known.begin(), known.end(), file.addressing) == known.end()) {
        object.fail("unknown addressing '" + file.addressing + "'");
    }
    return file;
}

using Shape = std::vector<std::int64_t>;

std::string quote(const Shape& shape) { return Json(shape).dump(); }

const TensorSpec* find(const std::vector<TensorSpec>& tensors, const std::string& role, std::size_t index) {
    for (const TensorSpec& tensor : tensors) {
        if (tensor.role == role && tensor.index == index) {
            return &tensor;
        }
    }
    return nullptr;
}

// Exactly the expected (role, index) pairs, each with its shape.
struct Expected {
    const char* role;
    std::size_t index;
    Shape shape;
};

void check_tensors(const std::vector<TensorSpec>& tensors, const std::vector<Expected>& expected,
                   const JsonObject& graph, const char* kind) {
    for (const Expected& entry : expected) {
        const std::string label = std::string(kind) + " " + entry.role + "[" + std::to_string(entry.index) + "]";
        const TensorSpec* tensor = find(tensors, entry.role, entry.index);
        if (tensor == nullptr) {
            graph.fail("the " + label + " is missing");
        }
        if (tensor->shape != entry.shape) {
            graph.fail("the " + label + " has shape " + quote(tensor->shape) + ", expected " + quote(entry.shape));
        }
    }
}

void check_count(const std::vector<TensorSpec>& tensors, std::size_t expected, const JsonObject& graph,
                 const char* kind) {
    if (tensors.size() != expected) {
        graph.fail("there are " + std::to_string(tensors.size()) + " " + kind + "s, expected " +
                   std::to_string(expected));
    }
}

std::int64_t size(std::size_t value) { return static_cast<std::int64_t>(value); }

// The graph input that takes a ROM file's rows for `tokens` tokens.
Shape rows_shape(const RowFile& rom, std::int64_t tokens) {
    if (rom.masked()) {
        return {1, tokens, size(rom.rows_per_token), size(rom.row_dim)};
    }
    return {1, tokens, size(rom.rows_per_token * rom.row_dim)};
}

// The states of the memories, as `graph` lists them; `check` compares both graphs with them.
std::vector<StateShape> find_states(const GraphFile& graph, const JsonObject& object) {
    std::vector<StateShape> states;
    for (const TensorSpec* tensor; (tensor = find(graph.inputs, "memory_state", states.size())) != nullptr;) {
        const Shape& shape = tensor->shape;
        if (shape.size() != 3 || shape[0] != 1 || shape[1] < 1 || shape[2] < 1) {
            object.fail("the input memory_state[" + std::to_string(states.size()) + "] has shape " + quote(shape) +
                        ", expected [1, length, dim]");
        }
        states.push_back({static_cast<std::size_t>(shape[1]), static_cast<std::size_t>(shape[2])});
    }
    return states;
}

void check(const GraphSpec& spec, const GraphFile& graph, const JsonObject& object) {
    const std::int64_t tokens = size(graph.num_tokens), context = size(spec.context_length);
    const std::int64_t heads = size(spec.num_key_value_heads), head_dim = size(spec.head_dim);
    const auto num_masks = static_cast<std::size_t>(
        std::count_if(spec.roms.begin(), spec.roms.end(), [](const RowFile& rom) { return rom.masked(); }));
    const std::size_t num_kept = 2 * spec.num_hidden_layers + spec.memory_states.size();
    check_count(graph.inputs, 4 + spec.roms.size() + num_masks + num_kept, object, "input");
    check_count(graph.outputs, 1 + num_kept, object, "output");
    std::vector<Expected> inputs = {
        {"input_embeds", 0, {1, tokens, size(spec.hidden_size)}},
        // Added to the scores: 0 or mask_value; the cache's slots first, then the new tokens.
        {"attention_mask", 0, {1, 1, tokens, context + tokens}},
        {"position_cos", 0, {1, tokens, head_dim / 2}},
        {"position_sin", 0, {1, tokens, head_dim / 2}},
    };
    for (std::size_t rom = 0; rom < spec.roms.size(); ++rom) {
        inputs.push_back({"memory_rows", rom, rows_shape(spec.roms[rom], tokens)});
        if (spec.roms[rom].masked()) {  // 0 for a token's own rows, mask_value for the others
            inputs.push_back({"memory_mask", rom, {1, tokens, size(spec.roms[rom].rows_per_token)}});
        }
    }
    std::vector<Expected> outputs = {{"logits", 0, {1, tokens, size(spec.vocab_size)}}};
    for (std::size_t index = 0; index < spec.memory_states.size(); ++index) {
        const auto [length, dim] = spec.memory_states[index];
        inputs.push_back({"memory_state", index, {1, size(length), size(dim)}});
        outputs.push_back({"present_memory_state", index, {1, tokens, size(dim)}});
    }
    for (std::size_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
        inputs.push_back({"past_key", layer, {1, heads, head_dim, context}});  // transposed
        inputs.push_back({"past_value", layer, {1, heads, context, head_dim}});
        // As the new states, the new tokens only: the caller writes them where they are kept.
        outputs.push_back({"present_key", layer, {1, heads, head_dim, tokens}});
        outputs.push_back({"present_value", layer, {1, heads, tokens, head_dim}});
    }
    check_tensors(graph.inputs, inputs, object, "input");
    check_tensors(graph.outputs, outputs, object, "output");
}

}  // namespace

std::size_t TensorSpec::num_elements() const {
    std::size_t product = 1;
    for (const std::int64_t size : shape) {
        product *= static_cast<std::size_t>(size);
    }
    return product;
}

bool RowFile::masked() const { return addressing == RaggedAddress::name; }

const TensorSpec& GraphFile::input(const std::string& role, std::size_t index) const {
    const TensorSpec* found = find(inputs, role, index);
    assert(found != nullptr);  // read_graph_spec checked that every role is there
    return *found;
}

const TensorSpec& GraphFile::output(const std::string& role, std::size_t index) const {
    const TensorSpec* found = find(outputs, role, index);
    assert(found != nullptr);
    return *found;
}

GraphSpec read_graph_spec(const std::string& path) {
    const Json parsed = parse_json(File(path).read_text(max_bytes), path, fix);
    const JsonObject root(parsed, path, fix);
    if (root.integer("schema") != 1) {
        root.fail("graph spec schema " + std::to_string(root.integer("schema")) + ", this version reads 1");
    }
    root.allow_only({"schema", "vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim",
                     "rope_theta", "context_length", "mask_value", "eos_token_id", "prefill", "decode", "embedding",
                     "roms"});
    GraphSpec spec{size_at(root, "vocab_size"),
                   size_at(root, "hidden_size"),
                   size_at(root, "num_hidden_layers"),
                   size_at(root, "num_key_value_heads"),
                   size_at(root, "head_dim"),
                   root.number("rope_theta"),
                   size_at(root, "context_length"),
                   static_cast<float>(root.number("mask_value")),
                   parse_graph(root.object("prefill")),
                   parse_graph(root.object("decode")),
                   parse_row_file(root.object("embedding")),
                   {},
                   {}};
    for (const Json& value : root.list("roms")) {
        const std::string where = path + ": roms[" + std::to_string(spec.roms.size()) + "]";
        spec.roms.push_back(parse_row_file({value, where, fix}));
    }
    spec.memory_states = find_states(spec.decode, root.object("decode"));
    if (!(spec.rope_theta > 0)) {
        root.fail("'rope_theta' is not positive");
    }
    if (spec.decode.num_tokens != 1) {
        root.fail("the decode graph takes " + std::to_string(spec.decode.num_tokens) + " tokens a call, not 1");
    }
    if (spec.embedding.addressing != IdentityAddress::name || spec.embedding.rows_per_token != 1) {
        root.fail("the embedding is not addressed by 'identity', with one row a token");
    }
    if (spec.embedding.row_dim != spec.hidden_size) {
        root.fail("the embedding has " + std::to_string(spec.embedding.row_dim) + " elements a row, hidden_size is " +
                  std::to_string(spec.hidden_size));
    }
    check(spec, spec.prefill, root.object("prefill"));
    check(spec, spec.decode, root.object("decode"));
    return spec;
}

}  // namespace meki
