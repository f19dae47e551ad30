// A graph in parts, run by a backend of our own: in what order, on what memory, in which context, what is waited
// for, and that a step of decoding allocates nothing.

#include "generator.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <thread>

#include "half.h"
#include "temporary.h"

namespace {

std::atomic<bool> counting{false};
std::atomic<std::size_t> num_allocations{0};
thread_local bool in_graph = false;  // what the backend allocates is its own affair

}  // namespace

// Never inlined: seen side by side, compilers take std::free for the wrong partner.
[[gnu::noinline]] void* operator new(std::size_t size) {
    if (counting && !in_graph) {
        ++num_allocations;
    }
    if (void* const memory = std::malloc(size > 0 ? size : 1)) {
        return memory;
    }
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using nlohmann::json;

constexpr std::size_t vocab_size = 8, hidden_size = 4, row_dim = 5, context = 6, prefill_tokens = 3;
auto part_time = std::chrono::milliseconds(100);  // far more than reading a row takes

const TemporaryDirectory directory;

json tensor(const std::string& role, const json& shape, const char* dtype = "float32", int index = 0) {
    return {{"name", role + std::to_string(index)}, {"role", role}, {"dtype", dtype}, {"shape", shape},
            {"index", index}};
}

// Layer 0 needs no rows; layer 1 does, in float16, and the head is in its part or in one of its own; the cache is
// float16.
json graph(const std::string& name, std::size_t tokens, std::size_t length, bool head_apart) {
    json parts = json::array();
    for (int layer = 0; layer < 2; ++layer) {
        json inputs = {tensor("attention_mask", {1, 1, tokens, length + tokens}),
                       tensor("position_cos", {1, tokens, 1}), tensor("position_sin", {1, tokens, 1}),
                       tensor("past_key", {1, 1, 2, length}, "float16", layer),
                       tensor("past_value", {1, 1, length, 2}, "float16", layer),
                       layer == 0 ? tensor("input_embeds", {1, tokens, hidden_size})
                                  : tensor("hidden", {1, tokens, hidden_size}, "float16")};
        json outputs = {layer == 0 || head_apart ? tensor("hidden", {1, tokens, hidden_size}, "float16", layer)
                                                 : tensor("logits", {1, tokens, vocab_size}, "float16"),
                        tensor("present_key", {1, 1, 2, tokens}, "float16", layer),
                        tensor("present_value", {1, 1, tokens, 2}, "float16", layer)};
        if (layer == 1) {
            inputs.push_back(tensor("memory_rows", {1, tokens, row_dim}, "float16"));
        }
        parts.push_back({{"file", name + std::to_string(layer)}, {"inputs", inputs}, {"outputs", outputs}});
    }
    if (head_apart) {
        parts.push_back({{"file", name + "2"},
                         {"inputs", {tensor("hidden", {1, tokens, hidden_size}, "float16", 1)}},
                         {"outputs", {tensor("logits", {1, tokens, vocab_size}, "float16")}}});
    }
    return {{"num_tokens", tokens}, {"parts", parts}};
}

void write_bundle(const std::vector<std::size_t>& shorter = {}, bool head_apart = false) {
    const auto file = [](const char* name, std::size_t dim) {
        return json{{"file", name}, {"row_dim", dim}, {"addressing", "identity"}, {"rows_per_token", 1}};
    };
    json spec = {{"schema", 3}, {"vocab_size", vocab_size}, {"hidden_size", hidden_size},
                 {"num_hidden_layers", 2}, {"num_key_value_heads", 1}, {"head_dim", 2}, {"rope_theta", 100.0},
                 {"context_length", context}, {"mask_value", -100.0}, {"eos_token_id", nullptr},
                 {"prefill", graph("prefill", prefill_tokens, context, head_apart)},
                 {"decode", graph("decode", 1, context, head_apart)},
                 {"embedding", file("embedding", hidden_size)}, {"roms", json::array({file("rom", row_dim)})},
                 {"shorter", json::array()}};
    for (const std::size_t length : shorter) {
        const std::string name = "_c" + std::to_string(length) + "_";
        spec["shorter"].push_back({{"context_length", length},
                                   {"prefill", graph("prefill" + name, prefill_tokens, length, head_apart)},
                                   {"decode", graph("decode" + name, 1, length, head_apart)}});
    }
    write_file(directory / "graph_spec.json", spec.dump());
    write_rom(directory / "embedding", vocab_size, 64, hidden_size);
    write_rom(directory / "rom", vocab_size, 64, row_dim);
    add_checksums(directory / "rom", sizeof(float) * row_dim);
}

// Memory of the backend's own, all of which comes back before the backend goes.
class CountingAllocator final : public meki::Allocator {
public:
    ~CountingAllocator() override { CHECK(live_.empty()); }

    void* allocate(std::size_t num_bytes) override {
        void* const data = meki::host_allocator().allocate(num_bytes);
        live_[data] = num_bytes;
        return data;
    }
    void free(void* data) noexcept override {
        CHECK(live_.erase(data) == 1);
        meki::host_allocator().free(data);
    }

    // Whether all of these bytes are in one piece of its memory.
    bool holds(const void* data, std::size_t num_bytes) const {
        const auto found = live_.find(const_cast<void*>(data));
        return found != live_.end() && num_bytes <= found->second;
    }

private:
    std::map<void*, std::size_t> live_;
};

// Copies its input on, its rows behind the first logit of their part, and the first element of what it gives to the
// keys. A head that is apart sees no rows.
class CopyingGraph final : public meki::Graph {
public:
    CopyingGraph(std::string name, std::vector<std::string>& runs, const CountingAllocator& memory)
        : name_(std::move(name)), runs_(runs), memory_(memory) {}

    void bind_input(const meki::TensorSpec& tensor, void* data) override {
        bind(tensor, data);
        if (tensor.role == "past_key") {
            length_ = static_cast<std::size_t>(tensor.shape[3]);
        }
    }
    void bind_output(const meki::TensorSpec& tensor, void* data) override {
        bind(tensor, data, "given ");
        if (tensor.role == "hidden" || tensor.role == "logits") {
            num_tokens_ = static_cast<std::size_t>(tensor.shape[1]);
            given_size_ = static_cast<std::size_t>(tensor.shape[2]);
        }
    }

    void run() override {
        in_graph = true;
        copy();
        in_graph = false;
    }

    // The first element of each key that the mask let the last run see.
    std::vector<float> seen() const { return seen_; }

    std::uint16_t* half(const char* role) { return static_cast<std::uint16_t*>(bound_[role]); }

private:
    void bind(const meki::TensorSpec& tensor, void* data, const std::string& side = "") {
        CHECK(memory_.holds(data, tensor.num_elements() * tensor.type.size()));
        bound_[side + tensor.role] = data;
    }

    void copy() {
        runs_.push_back(name_);
        seen_.clear();
        for (std::size_t slot = 0; slot < length_; ++slot) {
            if (static_cast<const float*>(bound_["attention_mask"])[slot] == 0) {
                seen_.push_back(meki::half_to_float(half("past_key")[slot]));
            }
        }
        if (bound_.count("input_embeds") != 0) {
            std::this_thread::sleep_for(part_time);
        }
        std::uint16_t* const given = half(bound_.count("given hidden") != 0 ? "given hidden" : "given logits");
        for (std::size_t token = 0; token < num_tokens_; ++token) {
            std::uint16_t* const out = given + token * given_size_;
            for (std::size_t i = 0; i < hidden_size; ++i) {
                const std::size_t at = token * hidden_size + i;
                out[i] = bound_.count("input_embeds") != 0
                             ? meki::float_to_half(static_cast<const float*>(bound_["input_embeds"])[at])
                             : half("hidden")[at];
            }
            if (bound_.count("given logits") != 0 && bound_.count("memory_rows") != 0) {
                std::memcpy(out + 1, half("memory_rows") + token * row_dim, 2 * row_dim);
            }
            if (bound_.count("given present_key") != 0) {
                half("given present_key")[token] =
                    bound_.count("memory_rows") != 0 ? half("memory_rows")[token * row_dim] : out[0];
            }
        }
    }

    std::string name_;
    std::vector<std::string>& runs_;
    const CountingAllocator& memory_;
    std::map<std::string, void*> bound_;
    std::vector<float> seen_;
    std::size_t length_ = 0;
    std::size_t num_tokens_ = 1;
    std::size_t given_size_ = 0;  // of a token's hidden or logits
};

class CopyingBackend final : public meki::Backend {
public:
    explicit CopyingBackend(bool largest_is_first = false) : largest_is_first_(largest_is_first) {}

    std::string name() const override { return "copying"; }
    std::unique_ptr<meki::Graph> load(const std::string& bundle, const meki::PartFile& part) override {
        CHECK(bundle == directory / "");
        auto graph = std::make_unique<CopyingGraph>(part.file, runs, memory);
        graphs[part.file] = graph.get();
        return graph;
    }

    meki::Allocator& allocator() override {
        CHECK(!graphs.empty());  // a provider has none before
        return memory;
    }
    const char* tensor_memory() const override { return "shared"; }
    bool largest_first() const override { return largest_is_first_; }

    CountingAllocator memory;
    std::vector<std::string> runs;
    std::map<std::string, CopyingGraph*> graphs;

private:
    bool largest_is_first_;
};

void check_logits(const meki::Generator& generator, std::uint32_t id) {
    CHECK(generator.logits()[0] == rom_element(id, 0));  // the embedding's first element, through both parts
    for (std::size_t i = 0; i < row_dim; ++i) {
        // 1/1024 does not fit beside a large integer in a float16.
        CHECK(generator.logits()[1 + i] == meki::half_to_float(meki::float_to_half(rom_element(id, i))));
    }
}

void parts_run_in_order() {
    CopyingBackend backend;
    meki::Generator generator(directory / "", backend, {meki::IoMode::pread, 0, false}, true);
    std::vector<meki::Step> steps;
    generator.prefill({5, 2, 7, 1}, steps);  // a whole chunk, and one token in the decode graph
    CHECK((backend.runs == std::vector<std::string>{"prefill0", "prefill1", "decode0", "decode1"}));
    check_logits(generator, 1);
    generator.decode(6, steps);
    check_logits(generator, 6);
    CHECK(steps.size() == 3);
    for (const meki::Step& step : steps) {
        // The rows came while the first part ran: that part did not wait for them, and the second had no need to.
        CHECK(step.fetched.rows_read == step.num_tokens && step.fetched.stall_us == 0);
        CHECK(step.fetched.deadlines_missed == 0 && step.fetched.slack_us && *step.fetched.slack_us > 0);
        CHECK(step.run_us >= 100000 && step.run_us <= step.end_us - step.start_us);
    }
    // Both graphs have the same cache, and each layer's keys are where its parts left them.
    for (const char* layer : {"0", "1"}) {
        const std::uint16_t* keys = backend.graphs["decode" + std::string(layer)]->half("past_key");
        CHECK(keys == backend.graphs["prefill" + std::string(layer)]->half("past_key"));
        const float expected[context] = {5, 2, 7, 1, 0, 0};  // the last token's are still to be written
        for (std::size_t slot = 0; slot < context; ++slot) {
            CHECK(meki::half_to_float(keys[slot]) == expected[slot]);
        }
    }
}

using Ids = std::vector<std::uint32_t>;
using Runs = std::vector<std::string>;

// Feeds `prompt` and then decodes `generated`; each step must run in the graphs `runs`, whose layers must see the
// keys of all tokens before it.
void feed(CopyingBackend& backend, meki::Generator& generator, const Ids& prompt, const Ids& generated,
          const Runs& runs) {
    backend.runs.clear();
    std::vector<meki::Step> steps;
    std::vector<float> fed;
    const auto check = [&](std::uint32_t last) {
        check_logits(generator, last);
        for (const char* layer : {"0", "1"}) {
            std::string name = backend.runs.back();
            name.back() = *layer;
            std::vector<float> before = fed;
            before.resize(fed.size() - steps.back().num_tokens);
            CHECK(backend.graphs[name]->seen() == before);
        }
    };
    fed.assign(prompt.begin(), prompt.end());
    generator.prefill(prompt, steps);
    check(prompt.back());
    for (const std::uint32_t id : generated) {
        fed.push_back(static_cast<float>(id));
        generator.decode(id, steps);
        check(id);
    }
    Runs expected;
    for (const std::string& run : runs) {
        expected.push_back(run + "0");
        expected.push_back(run + "1");
    }
    CHECK(backend.runs == expected);
    generator.reset();
}

void steps_run_in_the_shortest_context() {
    CopyingBackend backend;
    meki::Generator generator(directory / "", backend, {meki::IoMode::pread, 0, false}, true);
    for (int text = 0; text < 2; ++text) {  // a reset goes back to the shortest
        feed(backend, generator, {5}, {2, 7, 1, 6, 3},
             {"decode_c2_", "decode_c2_", "decode_c4_", "decode_c4_", "decode", "decode"});
        feed(backend, generator, {5, 2}, {7}, {"prefill_c2_", "decode_c4_"});
        feed(backend, generator, {5, 2, 7}, {1, 6}, {"prefill_c4_", "decode_c4_", "decode"});
        feed(backend, generator, {5, 2, 7, 1}, {6}, {"prefill_c4_", "decode_c4_", "decode"});
        // The second chunk crosses the border; its rows came while the first one ran.
        feed(backend, generator, {5, 2, 7, 1, 6}, {3}, {"prefill_c4_", "prefill", "decode"});
        feed(backend, generator, {5, 2, 7, 1, 6, 3}, {}, {"prefill_c4_", "prefill"});
    }
    // Only what is longer than the shortest and as long as a text comes is warmed up, and nothing is left of it.
    for (const auto& [length, runs] : std::map<std::size_t, Runs>{
             {2, {}},
             {3, {"prefill_c4_0", "prefill_c4_1", "decode_c4_0", "decode_c4_1"}},
             {6, {"prefill_c4_0", "prefill_c4_1", "decode_c4_0", "decode_c4_1", "prefill0", "prefill1", "decode0",
                  "decode1"}}}) {
        backend.runs.clear();
        generator.warm_up_contexts(length);
        CHECK(backend.runs == runs && generator.length() == 0);
        feed(backend, generator, {5, 2}, {7}, {"prefill_c2_", "decode_c4_"});
    }
}

// A prompt's chunks run without it; then decode's, in the same context, for the last token.
void a_head_apart_runs_once_a_prompt() {
    CopyingBackend backend;
    meki::Generator generator(directory / "", backend, {meki::IoMode::pread, 0, false}, true);
    for (const char* name : {"prefill_c2_2", "prefill_c4_2", "prefill2"}) {
        CHECK(backend.graphs.count(name) == 0);
    }
    std::vector<meki::Step> steps;
    const Ids prompt = {5, 2, 7, 1, 6};
    generator.prefill(prompt, steps);
    CHECK((backend.runs == Runs{"prefill_c4_0", "prefill_c4_1", "prefill0", "prefill1", "decode2"}));
    const auto check = [&](std::uint32_t id) {
        for (std::size_t i = 0; i < hidden_size; ++i) {
            CHECK(generator.logits()[i] == meki::half_to_float(meki::float_to_half(rom_element(id, i))));
        }
    };
    check(6);
    CHECK(backend.graphs["prefill1"]->seen() == (std::vector<float>{5, 2, 7}));
    backend.runs.clear();
    generator.decode(3, steps);
    CHECK((backend.runs == Runs{"decode0", "decode1", "decode2"}));
    check(3);
    CHECK(backend.graphs["decode1"]->seen() == (std::vector<float>{5, 2, 7, 1, 6}));
    CHECK(steps.size() == 3);
}

// A provider that notes the size of memory at its first use sees the longest context's first; nothing is left of that.
void the_longest_context_can_go_first() {
    CopyingBackend backend(true);
    meki::Generator generator(directory / "", backend, {meki::IoMode::pread, 0, false}, true);
    CHECK((backend.runs == Runs{"decode0", "decode1"}) && generator.length() == 0);
    feed(backend, generator, {5, 2}, {7}, {"prefill_c2_", "decode_c4_"});
}

// Of our own code, on any thread, once the vectors have their size.
void decoding_allocates_nothing(const meki::RowIo& io) {
    CopyingBackend backend;
    meki::Generator generator(directory / "", backend, io, true);
    std::vector<meki::Step> steps;
    steps.reserve(context);
    generator.prefill({5}, steps);
    CHECK(num_allocations == 0);
    counting = true;
    for (const std::uint32_t id : {2u, 7u, 2u}) {
        generator.decode(id, steps);
    }
    counting = false;
    CHECK(num_allocations == 0);
    check_logits(generator, 2);
    CHECK(steps.back().fetched.cache_hits == (io.cache_bytes > 0 ? 1 : 0));
    counting = true;
    const auto one = std::make_unique<int>(1);  // it does count
    counting = false;
    CHECK(num_allocations.exchange(0) == 1 && *one == 1);
}

}  // namespace

int main() {
    write_bundle();
    parts_run_in_order();
    for (const meki::IoMode mode : {meki::IoMode::pread, meki::IoMode::direct, meki::IoMode::mmap}) {
        decoding_allocates_nothing({mode, 0, true});
    }
    write_bundle({2, 4});
    decoding_allocates_nothing({meki::IoMode::pread, 1000, false});  // nor does growing
    part_time = {};
    steps_run_in_the_shortest_context();
    the_longest_context_can_go_first();
    write_bundle({2, 4}, true);
    a_head_apart_runs_once_a_prompt();
}
