// A file that is written whole or not at all.
#pragma once

#include <string>

namespace meki {

class OutputFile {
public:
    // Creates a temporary file beside `path` at once (where it is a link: beside the file that it leads to), so that a
    // bad path is found before the work is done. Throws Error if that fails, or something else than a file is there.
    explicit OutputFile(const std::string& path);
    // Removes the temporary file unless `commit` renamed it.
    ~OutputFile();
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;

    // Writes `text`, waits until it is on the disk, and renames the file into place.
    void commit(const std::string& text);

private:
    std::string path_;
    std::string temporary_;
    int descriptor_;
};

// Writes all of `text` to a descriptor. Throws Error naming `where`.
void write_all(int descriptor, const void* data, std::size_t num_bytes, const std::string& where);

}  // namespace meki
