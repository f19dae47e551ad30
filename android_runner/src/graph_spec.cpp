#include "graph_spec.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "address.h"
#include "file.h"
#include "strict_json.h"

namespace meki {

namespace {

constexpr std::int64_t schema = 3;
constexpr std::uint64_t max_bytes = 64 << 20;
constexpr std::uint64_t max_elements = std::uint64_t{1} << 36;  // of a tensor
constexpr std::uint64_t max_size = std::uint64_t{1} << 31;      // of an axis
// Of the mask: exp of it is nothing beside any real score, and float16 holds it.
constexpr double least_mask = -65504, largest_mask = -50;
constexpr const char* fix = "regenerate the directory with `meki-edge export` and `meki-edge pack`";

std::size_t size_at(const JsonObject& object, const char* key) {
    const std::uint64_t value = object.count(key, 1);
    if (value > max_size) {
        object.fail(std::string("'") + key + "' is " + std::to_string(value) + ", more than this reader's limit");
    }
    return static_cast<std::size_t>(value);
}

// The name of a file of the bundle, which reads nothing outside its directory.
std::string file_at(const JsonObject& object) {
    const std::string name = object.text("file");
    if (!is_file_name(name)) {
        object.fail("'file' is '" + name + "', not the name of a file in the bundle's directory");
    }
    return name;
}

float mask_at(const JsonObject& object) {
    const double value = object.number("mask_value");
    if (!(value >= least_mask && value <= largest_mask)) {
        object.fail("'mask_value' is " + object.at("mask_value").dump() + ", not a number from -65504 to -50");
    }
    return static_cast<float>(value);
}

ElementType parse_type(const JsonObject& object) {
    static const std::map<std::string, DType> dtypes = {{"float32", DType::float32}, {"float16", DType::float16},
                                                        {"uint8", DType::uint8},     {"int8", DType::int8},
                                                        {"uint16", DType::uint16},   {"int16", DType::int16}};
    const auto dtype = dtypes.find(object.text("dtype"));
    if (dtype == dtypes.end()) {
        object.fail("dtype is '" + object.text("dtype") + "', not one that this harness knows");
    }
    const bool is_float = dtype->second == DType::float32 || dtype->second == DType::float16;
    const bool is_quantized = object.has("quantization") && !object.at("quantization").is_null();
    if (is_float == is_quantized) {
        object.fail(is_float ? "floats have no 'quantization'" : "integers need a 'quantization'");
    }
    if (is_float) {
        return {dtype->second, {}};
    }
    const JsonObject given = object.object("quantization");
    given.allow_only({"scale", "zero_point"});
    const auto scale = static_cast<float>(given.number("scale"));
    if (!(scale > 0 && scale < std::numeric_limits<float>::infinity())) {
        given.fail("'scale' is not a positive number");
    }
    const std::int64_t zero_point = given.integer("zero_point");
    if (std::abs(zero_point) > UINT16_MAX) {
        given.fail("'zero_point' is " + std::to_string(zero_point) + ", more than 16 bits hold");
    }
    return {dtype->second, Quantization{scale, static_cast<std::int32_t>(zero_point)}};
}

TensorSpec parse_tensor(const JsonObject& object) {
    object.allow_only({"name", "role", "dtype", "shape", "index", "quantization"});
    TensorSpec tensor{object.text("name"), object.text("role"), parse_type(object), {}, 0};
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

std::vector<TensorSpec> parse_tensors(const JsonObject& part, const char* key) {
    std::vector<TensorSpec> tensors;
    for (const Json& value : part.list(key)) {
        const std::string where = part.where() + "." + key + "[" + std::to_string(tensors.size()) + "]";
        tensors.push_back(parse_tensor({value, where, part.fix()}));
    }
    return tensors;
}

GraphFile parse_graph(const JsonObject& object) {
    object.allow_only({"num_tokens", "parts"});
    GraphFile graph{size_at(object, "num_tokens"), {}};
    for (const Json& value : object.list("parts")) {
        const JsonObject part(value, object.where() + ".parts[" + std::to_string(graph.parts.size()) + "]",
                              object.fix());
        part.allow_only({"file", "inputs", "outputs"});
        graph.parts.push_back({file_at(part), parse_tensors(part, "inputs"), parse_tensors(part, "outputs")});
    }
    return graph;
}

Context parse_context(const JsonObject& object) {
    return {size_at(object, "context_length"), parse_graph(object.object("prefill")),
            parse_graph(object.object("decode"))};
}

RowFile parse_row_file(const JsonObject& object) {
    object.allow_only({"file", "row_dim", "addressing", "rows_per_token"});
    RowFile file{file_at(object), size_at(object, "row_dim"), object.text("addressing"),
                 size_at(object, "rows_per_token")};
    const auto known = {IdentityAddress::name, RaggedAddress::name, NgramHashAddress::name};
    if (std::find(known.begin(), known.end(), file.addressing) == known.end()) {
        object.fail("unknown addressing '" + file.addressing + "'");
    }
    return file;
}

using Shape = std::vector<std::int64_t>;

constexpr const char* hidden = "hidden";  // what passes from part to part

std::string quote(const Shape& shape) { return Json(shape).dump(); }

std::string label(const char* kind, const std::string& role, std::size_t index) {
    return std::string(kind) + " " + role + "[" + std::to_string(index) + "]";
}

const TensorSpec* find(const std::vector<TensorSpec>& tensors, const std::string& role, std::size_t index) {
    for (const TensorSpec& tensor : tensors) {
        if (tensor.role == role && tensor.index == index) {
            return &tensor;
        }
    }
    return nullptr;
}

using Tensors = std::vector<TensorSpec> PartFile::*;  // the inputs or the outputs

const TensorSpec* find(const GraphFile& graph, Tensors tensors, const std::string& role, std::size_t index) {
    for (const PartFile& part : graph.parts) {
        if (const TensorSpec* found = find(part.*tensors, role, index)) {
            return found;
        }
    }
    return nullptr;
}

// The tensors that the host feeds or takes. Parts may share an input, if it is the same; an output has one origin.
std::size_t count_tensors(const GraphFile& graph, Tensors tensors, const JsonObject& object, const char* kind) {
    std::set<std::pair<std::string, std::size_t>> distinct;
    for (const PartFile& part : graph.parts) {
        std::set<std::pair<std::string, std::size_t>> own;
        for (const TensorSpec& tensor : part.*tensors) {
            const TensorSpec& first = *find(graph, tensors, tensor.role, tensor.index);
            if (tensor.shape != first.shape || tensor.type != first.type) {
                object.fail("the " + label(kind, tensor.role, tensor.index) + " is not the same in all parts");
            }
            const bool is_new = own.emplace(tensor.role, tensor.index).second;
            if (tensor.role == hidden) {
                continue;  // `check_chain` looks at it
            }
            if (!is_new || (!distinct.emplace(tensor.role, tensor.index).second && tensors == &PartFile::outputs)) {
                object.fail("the " + label(kind, tensor.role, tensor.index) + " is there twice");
            }
        }
    }
    return distinct.size();
}

void check_count(const GraphFile& graph, Tensors tensors, std::size_t expected, const JsonObject& object,
                 const char* kind) {
    const std::size_t found = count_tensors(graph, tensors, object, kind);
    if (found != expected) {
        object.fail("there are " + std::to_string(found) + " " + kind + "s, expected " + std::to_string(expected));
    }
}

// A tensor by its role and index, and the shape that it must have.
struct Expected {
    const char* role;
    std::size_t index;
    Shape shape;
};

void check_shapes(const GraphFile& graph, Tensors tensors, const std::vector<Expected>& expected,
                  const JsonObject& object, const char* kind) {
    for (const Expected& entry : expected) {
        const TensorSpec* tensor = find(graph, tensors, entry.role, entry.index);
        if (tensor == nullptr) {
            object.fail("the " + label(kind, entry.role, entry.index) + " is missing");
        }
        if (tensor->shape != entry.shape) {
            object.fail("the " + label(kind, entry.role, entry.index) + " has shape " + quote(tensor->shape) +
                        ", expected " + quote(entry.shape));
        }
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

// The states of the memories, as `graph` lists them; `check` compares all graphs with them.
std::vector<StateShape> find_states(const GraphFile& graph, const JsonObject& object) {
    std::vector<StateShape> states;
    for (const TensorSpec* tensor;
         (tensor = find(graph, &PartFile::inputs, "memory_state", states.size())) != nullptr;) {
        const Shape& shape = tensor->shape;
        if (shape.size() != 3 || shape[0] != 1 || shape[1] < 1 || shape[2] < 1) {
            object.fail("the input memory_state[" + std::to_string(states.size()) + "] has shape " + quote(shape) +
                        ", expected [1, length, dim]");
        }
        states.push_back({static_cast<std::size_t>(shape[1]), static_cast<std::size_t>(shape[2]), tensor->type});
    }
    return states;
}

// Part after part: the first takes no `hidden`, each other the one that the part before it gives.
void check_chain(const GraphSpec& spec, const GraphFile& graph, const JsonObject& object) {
    const Shape shape = {1, size(graph.num_tokens), size(spec.hidden_size)};
    const auto check = [&](const PartFile& part, Tensors tensors, const char* kind, bool wanted, std::size_t index) {
        const auto is_hidden = [](const TensorSpec& tensor) { return tensor.role == hidden; };
        const auto count = std::count_if((part.*tensors).begin(), (part.*tensors).end(), is_hidden);
        const TensorSpec* found = find(part.*tensors, hidden, index);
        if (count != (wanted ? 1 : 0) || (wanted && (found == nullptr || found->shape != shape))) {
            const std::string asked = wanted ? "exactly the " + label(kind, hidden, index) + " " + quote(shape)
                                             : std::string("no ") + kind + " " + hidden;
            object.fail(part.file + " must have " + asked);
        }
        return found;
    };
    for (std::size_t i = 0; i < graph.parts.size(); ++i) {
        const TensorSpec* taken = check(graph.parts[i], &PartFile::inputs, "input", i > 0, i - 1);
        check(graph.parts[i], &PartFile::outputs, "output", i + 1 < graph.parts.size(), i);
        if (taken != nullptr && find(graph.parts[i - 1].outputs, hidden, i - 1)->type != taken->type) {
            object.fail(graph.parts[i].file + " takes another type of hidden than the part before it gives");
        }
    }
}

// What is kept has one type in both graphs, coming and going.
void check_kept(const GraphSpec& spec, const JsonObject& root) {
    const Context& context = spec.longest();
    const auto check = [&](const char* past, const char* present, std::size_t index) {
        const ElementType& type = context.decode.input(past, index).type;
        for (const GraphFile* graph : {&context.prefill, &context.decode}) {
            if (graph->input(past, index).type != type || graph->output(present, index).type != type) {
                root.fail("the " + label("input", past, index) + " and what goes into it are not of one type");
            }
        }
    };
    for (std::size_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
        check("past_key", "present_key", layer);
        check("past_value", "present_value", layer);
    }
    for (std::size_t index = 0; index < spec.memory_states.size(); ++index) {
        check("memory_state", "present_memory_state", index);
    }
}

// A graph has the tokens and the tensors, part by part, that it has in the longest context. The shapes are `check`'s.
void check_alike(const GraphFile& graph, const GraphFile& longest, const JsonObject& object) {
    if (graph.num_tokens != longest.num_tokens) {
        object.fail("the graph takes " + std::to_string(graph.num_tokens) + " tokens a call, in the longest context " +
                    std::to_string(longest.num_tokens));
    }
    if (graph.parts.size() != longest.parts.size()) {
        object.fail("the graph has " + std::to_string(graph.parts.size()) + " parts, in the longest context " +
                    std::to_string(longest.parts.size()));
    }
    const auto check = [&](const PartFile& part, const PartFile& other, Tensors tensors, const char* kind) {
        for (const TensorSpec& tensor : part.*tensors) {
            const TensorSpec* found = find(other.*tensors, tensor.role, tensor.index);
            if (found == nullptr || found->type != tensor.type) {
                object.fail("the " + label(kind, tensor.role, tensor.index) + " of " + part.file + " is not that of " +
                            other.file);
            }
        }
        if ((part.*tensors).size() != (other.*tensors).size()) {
            object.fail(part.file + " has fewer " + kind + "s than " + other.file);
        }
    };
    for (std::size_t i = 0; i < graph.parts.size(); ++i) {
        check(graph.parts[i], longest.parts[i], &PartFile::inputs, "input");
        check(graph.parts[i], longest.parts[i], &PartFile::outputs, "output");
    }
}

// A part's graph knows its tensors by name.
void check_names(const PartFile& part, const JsonObject& object) {
    std::set<std::string> names;
    for (const auto* tensors : {&part.inputs, &part.outputs}) {
        for (const TensorSpec& tensor : *tensors) {
            if (!names.insert(tensor.name).second) {
                object.fail(part.file + " has two tensors called '" + tensor.name + "'");
            }
        }
    }
}

void check(const GraphSpec& spec, std::size_t num_slots, const GraphFile& graph, const JsonObject& object) {
    const std::int64_t tokens = size(graph.num_tokens), context = size(num_slots);
    const std::int64_t heads = size(spec.num_key_value_heads), head_dim = size(spec.head_dim);
    const auto num_masks = static_cast<std::size_t>(
        std::count_if(spec.roms.begin(), spec.roms.end(), [](const RowFile& rom) { return rom.masked(); }));
    const std::size_t num_kept = 2 * spec.num_hidden_layers + spec.memory_states.size();
    check_count(graph, &PartFile::inputs, 4 + spec.roms.size() + num_masks + num_kept, object, "input");
    check_count(graph, &PartFile::outputs, 1 + num_kept, object, "output");
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
        const auto& [length, dim, type] = spec.memory_states[index];
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
    check_shapes(graph, &PartFile::inputs, inputs, object, "input");
    check_shapes(graph, &PartFile::outputs, outputs, object, "output");
    check_chain(spec, graph, object);
    for (const PartFile& part : graph.parts) {
        check_names(part, object);
    }
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
    const TensorSpec* found = find(*this, &PartFile::inputs, role, index);
    assert(found != nullptr);  // read_graph_spec checked that every role is there
    return *found;
}

const TensorSpec& GraphFile::output(const std::string& role, std::size_t index) const {
    const TensorSpec* found = find(*this, &PartFile::outputs, role, index);
    assert(found != nullptr);
    return *found;
}

std::size_t GraphSpec::context_for(std::size_t num_tokens) const {
    std::size_t index = 0;
    while (contexts[index].length < num_tokens) {
        ++index;
        assert(index < contexts.size());
    }
    return index;
}

bool GraphSpec::head_is_apart() const {
    const auto is_head = [](const PartFile& part) {
        return part.inputs.size() == 1 && part.inputs.front().role == "hidden" && part.outputs.size() == 1 &&
               part.outputs.front().role == "logits";
    };
    const PartFile& prefill = longest().prefill.parts.back();
    const PartFile& decode = longest().decode.parts.back();
    return is_head(prefill) && is_head(decode) && prefill.inputs.front().type == decode.inputs.front().type;
}

GraphSpec read_graph_spec(const std::string& path) {
    const Json parsed = parse_json(File(path).read_text(max_bytes), path, fix);
    const JsonObject root(parsed, path, fix);
    if (root.integer("schema") != schema) {
        root.fail("graph spec schema " + std::to_string(root.integer("schema")) + ", this version reads " +
                  std::to_string(schema));
    }
    root.allow_only({"schema", "vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim",
                     "rope_theta", "context_length", "mask_value", "eos_token_id", "prefill", "decode", "embedding",
                     "roms", "shorter"});
    GraphSpec spec{size_at(root, "vocab_size"),
                   size_at(root, "hidden_size"),
                   size_at(root, "num_hidden_layers"),
                   size_at(root, "num_key_value_heads"),
                   size_at(root, "head_dim"),
                   root.number("rope_theta"),
                   mask_at(root),
                   {},
                   parse_row_file(root.object("embedding")),
                   {},
                   {}};
    std::vector<JsonObject> contexts;
    if (root.has("shorter")) {
        for (const Json& value : root.list("shorter")) {
            contexts.emplace_back(value, path + ": shorter[" + std::to_string(contexts.size()) + "]", fix);
            contexts.back().allow_only({"context_length", "prefill", "decode"});
        }
    }
    contexts.push_back(root);
    for (const JsonObject& context : contexts) {
        spec.contexts.push_back(parse_context(context));
    }
    for (const Json& value : root.list("roms")) {
        const std::string where = path + ": roms[" + std::to_string(spec.roms.size()) + "]";
        spec.roms.push_back(parse_row_file({value, where, fix}));
    }
    spec.memory_states = find_states(spec.longest().decode, root.object("decode"));
    if (!(spec.rope_theta > 0)) {
        root.fail("'rope_theta' is not positive");
    }
    if (!root.at("eos_token_id").is_null() && root.count("eos_token_id") >= spec.vocab_size) {
        root.fail("'eos_token_id' is " + root.at("eos_token_id").dump() + ", the vocabulary has " +
                  std::to_string(spec.vocab_size) + " tokens");
    }
    if (const std::size_t taken = spec.longest().decode.num_tokens; taken != 1) {
        root.fail("the decode graph takes " + std::to_string(taken) + " tokens a call, not 1");
    }
    if (spec.embedding.addressing != IdentityAddress::name || spec.embedding.rows_per_token != 1) {
        root.fail("the embedding is not addressed by 'identity', with one row a token");
    }
    if (spec.embedding.row_dim != spec.hidden_size) {
        root.fail("the embedding has " + std::to_string(spec.embedding.row_dim) + " elements a row, hidden_size is " +
                  std::to_string(spec.hidden_size));
    }
    for (std::size_t i = 0; i < contexts.size(); ++i) {
        const Context& context = spec.contexts[i];
        if (i > 0 && context.length <= spec.contexts[i - 1].length) {
            contexts[i].fail("a context of " + std::to_string(context.length) + " tokens follows one of " +
                             std::to_string(spec.contexts[i - 1].length) + ": they must ascend");
        }
        check(spec, context.length, context.prefill, contexts[i].object("prefill"));
        check(spec, context.length, context.decode, contexts[i].object("decode"));
        check_alike(context.prefill, spec.longest().prefill, contexts[i].object("prefill"));
        check_alike(context.decode, spec.longest().decode, contexts[i].object("decode"));
    }
    check_kept(spec, root);
    return spec;
}

}  // namespace meki
