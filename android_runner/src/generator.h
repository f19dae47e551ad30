// Runs the model over tokens: prefill in chunks, decode one by one, rows fetched behind other work. Each step runs in
// the shortest context that holds the text up to its end.
//
// A step submits its tokens to the reader threads first (one a ROM file), then does what needs no rows
// — writes the last step's keys, values and states where they are kept, copies the embeddings, fills
// mask and angles, runs the graph's parts up to the first that takes rows — and only then waits for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"
#include "bound_graph.h"
#include "graph_spec.h"
#include "kv_cache.h"
#include "memory_states.h"
#include "row_fetcher.h"
#include "row_reader.h"
#include "stats.h"

namespace meki {

// How the rows of the ROM files are read.
struct RowIo {
    IoMode mode;
    // Memory for rows that are wanted again, shared by the files as their bytes a token are.
    std::uint64_t cache_bytes;
    // Compare each with its checksum.
    bool verify;
};

class Generator {
public:
    // Opens a bundle directory. The prefill graphs are loaded only if `with_prefill`; without them,
    // `prefill` runs token by token. Throws Error if the bundle's files do not belong together.
    Generator(const std::string& bundle, Backend& backend, const RowIo& io, bool with_prefill);

    const GraphSpec& spec() const { return spec_; }
    // Tokens fed since the last reset.
    std::size_t length() const { return length_; }
    // What the last token fed predicts: [vocab_size], valid until the next step. Null before the first.
    const float* logits() const { return logits_; }
    // Bytes from row to row in the ROM files, times the most rows that a token needs, added up.
    std::size_t rom_bytes_per_token() const;

    // Feed tokens. Throw Error if the context is full or an id is out of range, and Interrupted
    // between steps after a signal. Each appends its steps to `steps`, ended when the graph ended.
    void prefill(const std::vector<std::uint32_t>& ids, std::vector<Step>& steps);
    void decode(std::uint32_t id, std::vector<Step>& steps);

    // Runs each graph once in every context but the shortest that a text of `num_tokens` comes to: what a context's
    // first step would do else, such as planning memory, is done then. Forgets all tokens.
    void warm_up_contexts(std::size_t num_tokens);

    // Forgets all tokens.
    void reset();
    void drop_page_cache();

private:
    // What is there before memory for it can be.
    struct Loaded {
        GraphSpec spec;
        std::vector<BoundGraph::Parts> decode;  // the parts in each context
        std::vector<BoundGraph::Parts> prefill;  // empty without it
    };
    static Loaded load(const std::string& bundle, Backend& backend, bool with_prefill);

    Generator(const std::string& bundle, Backend& backend, const RowIo& io, Loaded loaded);

    // Consecutive tokens for one run of one graph, and the buffers that their rows go to.
    struct Chunk {
        BoundGraph* graph;
        std::size_t context;
        std::size_t position;
        std::size_t count;
        std::size_t row_slot;
    };
    struct Pending {
        BoundGraph* graph;
        std::size_t count;
        std::size_t position;
    };

    // Appends tokens to the sequence; they are fed by the chunks that follow.
    void append(const std::uint32_t* ids, std::size_t count);
    Chunk make_chunk(std::size_t position, std::size_t row_slot);
    void submit(const Chunk& chunk);
    void run(const Chunk& chunk, std::uint64_t start_us, std::vector<Step>& steps);
    void write_back();
    // One run over tokens that mean nothing.
    static void run_idle(BoundGraph& graph, std::size_t context);

    GraphSpec spec_;
    std::unique_ptr<RowReader> embedding_;
    KvCache cache_;
    MemoryStates states_;
    std::unique_ptr<BoundGraph> prefill_;
    std::unique_ptr<BoundGraph> decode_;
    // All tokens so far, of which `length_` were fed. Addresses look back into it, from the reader threads
    // too: it never moves.
    std::vector<std::uint32_t> sequence_;
    std::size_t length_ = 0;
    std::optional<Pending> pending_;
    const float* logits_ = nullptr;
    // One a ROM file. Last: their threads end before the buffers that they fill.
    std::vector<std::unique_ptr<RowFetcher>> fetchers_;
};

}  // namespace meki
