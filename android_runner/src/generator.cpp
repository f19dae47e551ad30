#include "generator.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "clock.h"
#include "error.h"
#include "interrupt.h"

namespace meki {

namespace {

constexpr const char* fix = "make the bundle again with `meki-edge pack`";

// A file of rows, which must be what the graphs take.
RomFile open_rows(const std::string& bundle, const RowFile& file, const GraphSpec& spec) {
    RomFile rom(bundle + "/" + file.file);
    const Address& address = rom.address();
    const auto fail = [&](const std::string& found, const std::string& needed) {
        throw Error("the file has " + found + ", the graph needs " + needed, rom.file().path(), fix);
    };
    if (address.kind() != file.addressing) {
        fail(std::string("the addressing ") + address.kind(), file.addressing);
    }
    if (address.num_tokens() != spec.vocab_size || rom.row_dim() != file.row_dim) {
        fail("rows of " + std::to_string(rom.row_dim()) + " elements for " + std::to_string(address.num_tokens()) +
                 " tokens",
             std::to_string(file.row_dim) + " for " + std::to_string(spec.vocab_size));
    }
    const std::size_t rows_per_token = address.rows_per_token();
    if (file.masked() ? rows_per_token > file.rows_per_token : rows_per_token != file.rows_per_token) {
        fail("up to " + std::to_string(rows_per_token) + " rows a token", std::to_string(file.rows_per_token));
    }
    return rom;
}

// The most bytes that a token's rows have.
std::size_t bytes_per_token(const RomFile& rom) { return rom.row_stride() * rom.address().rows_per_token(); }

}  // namespace

Generator::Generator(const std::string& bundle, Backend& backend, const RowIo& io, bool with_prefill)
    : Generator(bundle, backend, io, load(bundle, backend, with_prefill)) {}

Generator::Loaded Generator::load(const std::string& bundle, Backend& backend, bool with_prefill) {
    Loaded loaded;
    loaded.spec = read_graph_spec(bundle + "/graph_spec.json");
    const auto load_all = [&](GraphFile Context::*file, bool without_head) {
        std::vector<BoundGraph::Parts> contexts;
        for (const Context& context : loaded.spec.contexts) {
            BoundGraph::Parts& parts = contexts.emplace_back();
            const std::vector<PartFile>& files = (context.*file).parts;
            for (std::size_t part = 0; part < files.size() - (without_head ? 1 : 0); ++part) {
                parts.push_back(backend.load(bundle, files[part]));
            }
        }
        return contexts;
    };
    loaded.decode = load_all(&Context::decode, false);
    if (with_prefill) {
        // The logits of a prompt's last token are all that anybody wants: decode's head gives them.
        loaded.prefill = load_all(&Context::prefill, loaded.spec.head_is_apart());
    }
    return loaded;
}

Generator::Generator(const std::string& bundle, Backend& backend, const RowIo& io, Loaded loaded)
    : spec_(std::move(loaded.spec)),
      // Mapped: this thread copies its rows itself, and the hot ones stay in memory.
      embedding_(open_reader(open_rows(bundle, spec_.embedding, spec_), IoMode::mmap)),
      cache_(spec_, backend.allocator()),
      states_(spec_, backend.allocator()) {
    sequence_.reserve(spec_.longest().length);
    const auto bind = [&](GraphFile Context::*file, std::vector<BoundGraph::Parts> contexts) {
        return std::make_unique<BoundGraph>(spec_, file, std::move(contexts), cache_, states_, backend.allocator());
    };
    decode_ = bind(&Context::decode, std::move(loaded.decode));
    if (!loaded.prefill.empty()) {
        prefill_ = bind(&Context::prefill, std::move(loaded.prefill));
    }
    if (backend.largest_first() && spec_.contexts.size() > 1) {
        run_idle(*decode_, spec_.contexts.size() - 1);
        reset();
    }
    std::vector<RomFile> roms;
    std::size_t total_bytes = 0;
    for (const RowFile& file : spec_.roms) {
        const RomFile& rom = roms.emplace_back(open_rows(bundle, file, spec_));
        if (rom.tokenizer_sha256() != embedding_->rom().tokenizer_sha256()) {
            throw Error("the ROM file was made for another tokenizer than the embedding", rom.file().path(), fix);
        }
        total_bytes += bytes_per_token(rom);
    }
    for (RomFile& rom : roms) {
        const double share = static_cast<double>(bytes_per_token(rom)) / static_cast<double>(total_bytes);
        const auto cache_bytes = static_cast<std::uint64_t>(std::ceil(static_cast<double>(io.cache_bytes) * share));
        std::unique_ptr<RowReader> reader = open_reader(std::move(rom), io.mode, cache_bytes, io.verify);
        fetchers_.push_back(std::make_unique<RowFetcher>(std::move(reader), spec_.longest().prefill.num_tokens));
    }
}

std::size_t Generator::rom_bytes_per_token() const {
    std::size_t bytes = 0;
    for (const auto& fetcher : fetchers_) {
        bytes += bytes_per_token(fetcher->reader().rom());
    }
    return bytes;
}

void Generator::prefill(const std::vector<std::uint32_t>& ids, std::vector<Step>& steps) {
    if (ids.empty()) {
        return;
    }
    append(ids.data(), ids.size());
    std::uint64_t start_us = now_us();
    Chunk chunk = make_chunk(length_, 0);
    submit(chunk);
    while (true) {
        const std::size_t next = chunk.position + chunk.count;
        const bool last = next == sequence_.size();
        Chunk following{};
        if (!last) {  // its rows arrive while this chunk runs
            following = make_chunk(next, 1 - chunk.row_slot);
            submit(following);
        }
        run(chunk, start_us, steps);
        if (last) {
            return;
        }
        start_us = steps.back().end_us;
        chunk = following;
    }
}

void Generator::decode(std::uint32_t id, std::vector<Step>& steps) {
    const std::uint64_t start_us = now_us();
    append(&id, 1);
    const Chunk chunk = make_chunk(length_, 0);
    submit(chunk);
    run(chunk, start_us, steps);
}

void Generator::warm_up_contexts(std::size_t num_tokens) {
    reset();
    for (std::size_t context = 1; context <= spec_.context_for(num_tokens); ++context) {
        for (BoundGraph* graph : {prefill_.get(), decode_.get()}) {
            if (graph != nullptr) {
                run_idle(*graph, context);
            }
        }
    }
    reset();
}

void Generator::run_idle(BoundGraph& graph, std::size_t context) {
    graph.set_inputs(context, 0, 0);
    for (std::size_t part = 0; part < graph.num_parts(); ++part) {
        graph.run(part);
    }
}

void Generator::reset() {
    pending_.reset();
    cache_.clear();
    states_.clear();
    sequence_.clear();
    length_ = 0;
}

void Generator::drop_page_cache() {
    for (const auto& fetcher : fetchers_) {
        fetcher->reader().drop_page_cache();
    }
}

void Generator::append(const std::uint32_t* ids, std::size_t count) {
    const std::size_t context = spec_.longest().length;
    if (count > context - length_) {
        throw Error(std::to_string(length_ + count) + " tokens do not fit the context of " + std::to_string(context),
                    "context_length", "feed fewer tokens, or export with a longer --context-length");
    }
    for (std::size_t i = 0; i < count; ++i) {
        if (ids[i] >= spec_.vocab_size) {
            throw Error("token id " + std::to_string(ids[i]) + " is out of range: the vocabulary has " +
                            std::to_string(spec_.vocab_size),
                        "token ids", "encode the text with the bundle's tokenizer.json");
        }
    }
    sequence_.insert(sequence_.end(), ids, ids + count);
}

// The most tokens that one run takes. A single one is cheaper in the decode graph than padded.
Generator::Chunk Generator::make_chunk(std::size_t position, std::size_t row_slot) {
    const std::size_t remaining = sequence_.size() - position;
    BoundGraph* graph = remaining > 1 && prefill_ ? prefill_.get() : decode_.get();
    const std::size_t count = std::min(remaining, graph->num_tokens());
    return {graph, spec_.context_for(position + count), position, count, row_slot};
}

void Generator::submit(const Chunk& chunk) {
    for (std::size_t rom = 0; rom < fetchers_.size(); ++rom) {
        fetchers_[rom]->submit(sequence_.data(), chunk.position, chunk.count, chunk.graph->rows(rom, chunk.row_slot));
    }
}

void Generator::run(const Chunk& chunk, std::uint64_t start_us, std::vector<Step>& steps) {
    throw_if_interrupted();
    BoundGraph& graph = *chunk.graph;
    write_back();
    const std::size_t hidden_size = spec_.hidden_size;
    for (std::size_t i = 0; i < chunk.count; ++i) {
        embedding_->read({sequence_[chunk.position + i], 1}, graph.embeds() + i * hidden_size);
    }
    // Padding tokens come after the real ones, which therefore never see them.
    std::fill(graph.embeds() + chunk.count * hidden_size, graph.embeds() + graph.num_tokens() * hidden_size, 0.0f);
    graph.set_inputs(chunk.context, length_, chunk.row_slot);
    FetchStats fetched;
    std::uint64_t run_us = 0;
    for (std::size_t part = 0; part < graph.num_parts(); ++part) {
        for (const std::size_t rom : graph.new_roms(part)) {
            fetched += fetchers_[rom]->wait();
        }
        const std::uint64_t run_start_us = now_us();
        graph.run(part);
        run_us += now_us() - run_start_us;
    }
    const bool last = chunk.position + chunk.count == sequence_.size();
    if (!graph.has_head() && last) {
        const std::uint64_t run_start_us = now_us();
        decode_->run_head(chunk.context, graph, chunk.count - 1);
        run_us += now_us() - run_start_us;
    }
    const std::uint64_t end_us = now_us();
    pending_ = Pending{&graph, chunk.count, length_};
    length_ += chunk.count;
    logits_ = !last ? nullptr : graph.has_head() ? graph.logits(chunk.count - 1) : decode_->logits(0);
    steps.push_back({chunk.count, start_us, end_us, run_us, fetched});
}

void Generator::write_back() {
    if (pending_) {
        pending_->graph->write_back(pending_->count, pending_->position);
        pending_.reset();
    }
}

}  // namespace meki
