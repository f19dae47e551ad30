#include <unistd.h>
#include <vector>

#include "commands.h"
#include "id_file.h"
#include "output_file.h"
#include "row_fetcher.h"

namespace meki {

void fetch(const RowsOptions& options) {
    const std::vector<std::uint32_t> sequence = read_ids(options.ids_file);
    RowFetcher fetcher(open_reader(RomFile(options.rom), options.io), sequence.size());
    const RomFile& rom = fetcher.reader().rom();
    RowTensor tensor({sequence.size(), rom.address().rows_per_token(), rom.row_dim()}, 0);
    fetcher.submit(sequence.data(), 0, sequence.size(), tensor);
    fetcher.wait();
    const std::vector<std::int64_t> counts(tensor.counts().begin(), tensor.counts().end());
    write_all(STDOUT_FILENO, counts.data(), counts.size() * sizeof(std::int64_t), "stdout");
    write_all(STDOUT_FILENO, tensor.rows(), tensor.size() * sizeof(float), "stdout");
}

}  // namespace meki
