#include <unistd.h>
#include <vector>

#include "commands.h"
#include "id_file.h"
#include "output_file.h"

namespace meki {

void rows(const RowsOptions& options) {
    const std::unique_ptr<RowReader> reader = open_reader(RomFile(options.rom), options.io);
    std::vector<float> row(reader->rom().row_dim());
    for (const std::uint32_t id : read_ids(options.ids_file)) {
        reader->read({id, 1}, row.data());
        write_all(STDOUT_FILENO, row.data(), row.size() * sizeof(float), "stdout");
    }
}

}  // namespace meki
