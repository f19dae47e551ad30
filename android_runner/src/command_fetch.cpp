#include <algorithm>
#include <memory>
#include <unistd.h>
#include <utility>
#include <vector>

#include "commands.h"
#include "id_file.h"
#include "interrupt.h"
#include "output_file.h"
#include "row_fetcher.h"

namespace meki {

namespace {

void print(const RowTensor& tensor, std::size_t num_tokens) {
    const auto& counted = tensor.counts();
    const std::vector<std::int64_t> counts(counted.begin(), counted.begin() + static_cast<std::ptrdiff_t>(num_tokens));
    write_all(STDOUT_FILENO, counts.data(), counts.size() * sizeof(std::int64_t), "stdout");
    const std::size_t floats = tensor.size() / tensor.shape().num_tokens * num_tokens;
    write_all(STDOUT_FILENO, tensor.rows(), floats * sizeof(float), "stdout");
}

}  // namespace

void fetch(const FetchOptions& options) {
    const std::vector<std::uint32_t> sequence = read_ids(options.rows.ids_file);
    const std::size_t batch = options.batch == 0 ? sequence.size() : std::min(options.batch, sequence.size());
    std::unique_ptr<RowReader> reader = open_reader(RomFile(options.rows.rom), options.rows.io,
                                                    options.row_cache_bytes, options.rows.verify_rows);
    const RomFile& rom = reader->rom();
    std::vector<RowTensor> tensors;  // the batch that is printed, and the one that is fetched meanwhile
    for (std::size_t i = 0; i < (batch < sequence.size() ? 2 : 1); ++i) {
        tensors.emplace_back(RowTensor::Shape{batch, rom.address().rows_per_token(), rom.row_dim()}, 0.0f,
                             host_allocator());
    }
    RowFetcher fetcher(std::move(reader), batch);  // last: its thread ends before the tensors that it fills
    const auto count = [&](std::size_t position) { return std::min(batch, sequence.size() - position); };
    const auto tensor = [&](std::size_t position) -> RowTensor& { return tensors[position / batch % tensors.size()]; };
    fetcher.submit(sequence.data(), 0, batch, tensor(0));
    for (std::size_t position = 0; position < sequence.size(); position += batch) {
        throw_if_interrupted();
        fetcher.wait();
        if (const std::size_t next = position + batch; next < sequence.size()) {
            fetcher.submit(sequence.data(), next, count(next), tensor(next));
        }
        print(tensor(position), count(position));
    }
}

}  // namespace meki
