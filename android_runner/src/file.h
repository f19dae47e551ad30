// A file opened for reading, by its descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace meki {

class File {
public:
    // Throws Error if the file cannot be opened or is not a regular file.
    explicit File(const std::string& path);
    ~File();
    File(File&& other) noexcept;
    File& operator=(File&&) = delete;

    const std::string& path() const { return path_; }
    int descriptor() const { return descriptor_; }
    // The size when the file was opened.
    std::uint64_t size() const { return size_; }

    // The whole file as text. Throws Error if it is larger than `max_bytes`.
    std::string read_text(std::uint64_t max_bytes) const;

private:
    std::string path_;
    int descriptor_;
    std::uint64_t size_ = 0;
};

// Reads `num_bytes` at `offset` into `out`. Returns fewer only where the file ends; throws Error on a
// read failure, naming `path`.
std::size_t read_at(int descriptor, void* out, std::size_t num_bytes, std::uint64_t offset, const std::string& path);

// As `read_at`, but one read only: it may return fewer bytes than asked for, 0 at the end of the file.
std::size_t read_at_once(int descriptor, void* out, std::size_t num_bytes, std::uint64_t offset,
                         const std::string& path);

// Whether `name` is that of a file in a directory, not a path that may lead out of it.
bool is_file_name(const std::string& name);

// The message of an errno value.
std::string describe_errno(int code);

}  // namespace meki
