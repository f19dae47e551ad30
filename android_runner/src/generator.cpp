#include "generator.h"

#include <algorithm>
#include <utility>

#include "clock.h"
#include "error.h"
#include "interrupt.h"

namespace meki {

namespace {

constexpr const char* fix = "make the bundle again with `meki-edge pack`";

std::unique_ptr<RowReader> open_rows(const std::string& bundle, const RowFile& file, const GraphSpec& spec, IoMode io) {
    RomFile rom(bundle + "/" + file.file);
    if (rom.num_rows() != spec.vocab_size || rom.row_dim() != file.row_dim) {
        throw Error("the file has " + std::to_string(rom.num_rows()) + " rows of " + std::to_string(rom.row_dim()) +
                        " elements, the graph needs " + std::to_string(spec.vocab_size) + " of " +
                        std::to_string(file.row_dim),
                    rom.file().path(), fix);
    }
    return open_reader(std::move(rom), io);
}

}  // namespace

Generator::Generator(const std::string& bundle, Backend& backend, IoMode io, bool with_prefill)
    : spec_(read_graph_spec(bundle + "/graph_spec.json")),
      // Mapped: this thread copies its rows itself, and the hot ones stay in memory.
      embedding_(open_rows(bundle, spec_.embedding, spec_, IoMode::mmap)),
      cache_(spec_) {
    const auto load = [&](const GraphFile& file) {
        return std::make_unique<BoundGraph>(spec_, file, backend.load(bundle + "/" + file.file), cache_);
    };
    decode_ = load(spec_.decode);
    if (with_prefill) {
        prefill_ = load(spec_.prefill);
    }
    for (const RowFile& file : spec_.roms) {
        std::unique_ptr<RowReader> reader = open_rows(bundle, file, spec_, io);
        if (reader->rom().tokenizer_sha256() != embedding_->rom().tokenizer_sha256()) {
            throw Error("the ROM file was made for another tokenizer than the embedding", reader->rom().file().path(),
                        fix);
        }
        fetchers_.push_back(std::make_unique<RowFetcher>(std::move(reader), spec_.prefill.num_tokens));
    }
}

std::size_t Generator::rom_bytes_per_row() const {
    std::size_t bytes = 0;
    for (const auto& fetcher : fetchers_) {
        bytes += fetcher->reader().rom().row_stride();
    }
    return bytes;
}

void Generator::prefill(const std::vector<std::uint32_t>& ids, std::vector<Step>& steps) {
    check(ids.data(), ids.size());
    const std::uint32_t* next = ids.data();
    const std::uint32_t* const end = next + ids.size();
    if (next == end) {
        return;
    }
    std::uint64_t start_us = now_us();
    Chunk chunk = make_chunk(next, ids.size(), 0);
    submit(chunk);
    while (true) {
        next += chunk.count;
        const bool last = next == end;
        Chunk following{};
        if (!last) {  // its rows arrive while this chunk runs
            following = make_chunk(next, static_cast<std::size_t>(end - next), 1 - chunk.row_slot);
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
    check(&id, 1);
    const Chunk chunk{decode_.get(), &id, 1, 0};
    submit(chunk);
    run(chunk, start_us, steps);
}

void Generator::reset() {
    pending_.reset();
    cache_.clear();
    length_ = 0;
}

void Generator::drop_page_cache() {
    for (const auto& fetcher : fetchers_) {
        fetcher->reader().drop_page_cache();
    }
}

void Generator::check(const std::uint32_t* ids, std::size_t count) const {
    if (count > spec_.context_length - length_) {
        throw Error(std::to_string(length_ + count) + " tokens do not fit the context of " +
                        std::to_string(spec_.context_length),
                    "context_length", "feed fewer tokens, or export with a longer --context-length");
    }
    for (std::size_t i = 0; i < count; ++i) {
        if (ids[i] >= spec_.vocab_size) {
            throw Error("token id " + std::to_string(ids[i]) + " is out of range: the vocabulary has " +
                            std::to_string(spec_.vocab_size),
                        "token ids", "encode the text with the bundle's tokenizer.json");
        }
    }
}

// The most tokens that one run takes. A single one is cheaper in the decode graph than padded.
Generator::Chunk Generator::make_chunk(const std::uint32_t* ids, std::size_t remaining, std::size_t row_slot) {
    BoundGraph* graph = remaining > 1 && prefill_ ? prefill_.get() : decode_.get();
    return {graph, ids, std::min(remaining, graph->num_tokens()), row_slot};
}

void Generator::submit(const Chunk& chunk) {
    for (std::size_t rom = 0; rom < fetchers_.size(); ++rom) {
        fetchers_[rom]->submit(chunk.ids, chunk.count, chunk.graph->rows(rom, chunk.row_slot));
    }
}

void Generator::run(const Chunk& chunk, std::uint64_t start_us, std::vector<Step>& steps) {
    throw_if_interrupted();
    BoundGraph& graph = *chunk.graph;
    write_back();
    const std::size_t hidden_size = spec_.hidden_size;
    for (std::size_t i = 0; i < chunk.count; ++i) {
        embedding_->read(chunk.ids[i], graph.embeds() + i * hidden_size);
    }
    // Padding tokens come after the real ones, which therefore never see them.
    std::fill(graph.embeds() + chunk.count * hidden_size, graph.embeds() + graph.num_tokens() * hidden_size, 0.0f);
    graph.set_position(length_);
    graph.use_row_slot(chunk.row_slot);
    FetchStats fetched;
    for (std::size_t rom = 0; rom < fetchers_.size(); ++rom) {
        const std::size_t row_dim = spec_.roms[rom].row_dim;
        float* rows = graph.rows(rom, chunk.row_slot);
        std::fill(rows + chunk.count * row_dim, rows + graph.num_tokens() * row_dim, 0.0f);
        fetched += fetchers_[rom]->wait();
    }
    const std::uint64_t run_start_us = now_us();
    graph.run();
    const std::uint64_t end_us = now_us();
    pending_ = Pending{&graph, chunk.count, length_};
    length_ += chunk.count;
    logits_ = graph.logits(chunk.count - 1);
    steps.push_back({chunk.count, start_us, end_us, end_us - run_start_us, fetched});
}

void Generator::write_back() {
    if (pending_) {
        pending_->graph->write_back(pending_->count, pending_->position);
        pending_.reset();
    }
}

}  // namespace meki
