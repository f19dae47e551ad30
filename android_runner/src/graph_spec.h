// graph_spec.json: what every input and output of the exported graphs is.
//
// T is a graph's num_tokens, C the length of its context, KV num_key_value_heads, D head_dim, K the
// rows_per_token of a ROM file. The roles and their shapes are listed at `check` in graph_spec.cpp; nobody
// parses tensor names.
//
// A static graph attends to all C slots of the KV cache, used or not. So there may be more contexts than one, from
// few slots to many: a text runs in the shortest that holds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "element_type.h"

namespace meki {

struct TensorSpec {
    std::string name;
    std::string role;
    ElementType type;
    std::vector<std::int64_t> shape;
    std::size_t index;  // the layer, the ROM file, the memory state, or the part that gives `hidden`

    std::size_t num_elements() const;
};

// One ONNX file.
struct PartFile {
    std::string file;
    std::vector<TensorSpec> inputs;
    std::vector<TensorSpec> outputs;
};

// Parts that run in order. Each takes the output `hidden` of the one before, and what its layers need.
struct GraphFile {
    std::size_t num_tokens;
    std::vector<PartFile> parts;

    // The tensor of the first part that has it; the other parts' is of the same type and shape.
    const TensorSpec& input(const std::string& role, std::size_t index = 0) const;
    const TensorSpec& output(const std::string& role, std::size_t index = 0) const;
};

// Both graphs, with `length` slots of the KV cache.
struct Context {
    std::size_t length;
    GraphFile prefill;
    GraphFile decode;
};

// A ROM file that feeds a graph input by token id. A ragged one may have fewer than `rows_per_token`.
struct RowFile {
    std::string file;
    std::size_t row_dim;
    std::string addressing;
    std::size_t rows_per_token;

    // Whether a graph is told how many rows a token has.
    bool masked() const;
};

// The last `length` inputs of `dim` elements that a memory keeps.
struct StateShape {
    std::size_t length;
    std::size_t dim;
    ElementType type;
};

struct GraphSpec {
    std::size_t vocab_size;
    std::size_t hidden_size;
    std::size_t num_hidden_layers;
    std::size_t num_key_value_heads;
    std::size_t head_dim;
    double rope_theta;
    float mask_value;
    // Ascending. But for the length they are alike: the same parts take and give the same tensors, of one type.
    std::vector<Context> contexts;
    RowFile embedding;
    std::vector<RowFile> roms;
    std::vector<StateShape> memory_states;

    const Context& longest() const { return contexts.back(); }
    // Whether the last part of both graphs is the head alone, so that decode's serves a token of prefill's as well.
    bool head_is_apart() const;
    // The index of the shortest context that holds `num_tokens`, of which the longest must hold as many.
    std::size_t context_for(std::size_t num_tokens) const;
};

// Throws Error if the file is missing, is not such a spec, or its tensors do not fit its sizes or each other.
GraphSpec read_graph_spec(const std::string& path);

}  // namespace meki
