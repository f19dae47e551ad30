#include <unistd.h>

#include "buffer.h"
#include "commands.h"
#include "error.h"
#include "id_file.h"
#include "interrupt.h"
#include "output_file.h"

namespace meki {

void rows(const RowsOptions& options, bool raw) {
    const std::unique_ptr<RowReader> reader = open_reader(RomFile(options.rom), options.io, 0, options.verify_rows);
    if (raw && reader->rom().quantization() == nullptr) {
        throw Error("the rows are not integers with one quantization", options.rom, "read them without --raw");
    }
    const RowElement element = raw ? RowElement::raw : RowElement::float32;
    const Buffer<std::uint8_t> row(reader->rom().delivered_bytes(element));
    for (const std::uint32_t id : read_ids(options.ids_file)) {
        throw_if_interrupted();
        reader->read({id, 1}, element, row.data());
        write_all(STDOUT_FILENO, row.data(), row.size(), "stdout");
    }
}

}  // namespace meki
