#include "file.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "error.h"

namespace meki {

std::string describe_errno(int code) { return std::generic_category().message(code); }

bool is_file_name(const std::string& name) {
    static const std::string never("/\\\0", 3);
    return !name.empty() && name != "." && name != ".." && name.find_first_of(never) == std::string::npos;
}

// O_NONBLOCK does nothing to regular files; to open a pipe would wait for its writer.
File::File(const std::string& path)
    : path_(path), descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (descriptor_ < 0) {
        throw Error("cannot open the file: " + describe_errno(errno), path, "check the path");
    }
    struct stat status {};
    if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
        ::close(descriptor_);
        throw Error("this is not a regular file", path, "name a file");
    }
    size_ = static_cast<std::uint64_t>(status.st_size);
}

File::~File() {
    if (descriptor_ >= 0) {
        ::close(descriptor_);
    }
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_) {}

std::string File::read_text(std::uint64_t max_bytes) const {
    if (size_ > max_bytes) {
        throw Error("the file has " + std::to_string(size_) + " bytes, more than the " + std::to_string(max_bytes) +
                        " that such a file may have",
                    path_, "check that this is the right file");
    }
    std::string text(static_cast<std::size_t>(size_), '\0');
    text.resize(read_at(descriptor_, text.data(), text.size(), 0, path_));
    return text;
}

std::size_t read_at_once(int descriptor, void* out, std::size_t num_bytes, std::uint64_t offset,
                         const std::string& path) {
    while (true) {
        const ssize_t count = ::pread(descriptor, out, num_bytes, static_cast<off_t>(offset));
        if (count >= 0) {
            return static_cast<std::size_t>(count);
        }
        if (errno != EINTR) {
            throw Error("reading " + std::to_string(num_bytes) + " bytes at byte " + std::to_string(offset) +
                            " failed: " + describe_errno(errno),
                        path, "check the storage, or copy the file again");
        }
    }
}

std::size_t read_at(int descriptor, void* out, std::size_t num_bytes, std::uint64_t offset, const std::string& path) {
    std::size_t done = 0;
    while (done < num_bytes) {
        const std::size_t count =
            read_at_once(descriptor, static_cast<char*>(out) + done, num_bytes - done, offset + done, path);
        if (count == 0) {
            break;
        }
        done += count;
    }
    return done;
}

}  // namespace meki
