#include "output_file.h"

#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <system_error>
#include <unistd.h>

#include "error.h"
#include "file.h"

namespace meki {

namespace {

constexpr int max_links = 40;

std::string temporary_name(const std::string& path) {
    const std::size_t slash = path.rfind('/');
    const std::size_t name = slash == std::string::npos ? 0 : slash + 1;
    return path.substr(0, name) + "." + path.substr(name) + "." + std::to_string(::getpid()) + ".tmp";
}

[[noreturn]] void fail(const std::string& action, const std::string& path) {
    throw Error("cannot " + action + ": " + describe_errno(errno), path, "check the directory and the free space");
}

// What a rename may replace: nothing, a file, or the file that a link leads to; never a device or a directory.
std::string replaceable(const std::string& path) {
    namespace fs = std::filesystem;
    fs::path target = path;
    std::error_code ignored;  // what cannot be followed or looked at cannot be written either: that is said then
    for (int links = 0; links < max_links && fs::is_symlink(target, ignored); ++links) {
        target = target.parent_path() / fs::read_symlink(target, ignored);
    }
    const fs::file_status status = fs::status(target, ignored);
    if (fs::exists(status) && !fs::is_regular_file(status)) {
        throw Error("cannot write the output: this is not a regular file", path, "name a file, or a new one");
    }
    return target.string();
}

}  // namespace

OutputFile::OutputFile(const std::string& path)
    : path_(replaceable(path)),
      temporary_(temporary_name(path_)),
      descriptor_(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
    if (descriptor_ < 0) {
        fail("write the output", path_);
    }
}

OutputFile::~OutputFile() {
    if (descriptor_ >= 0) {
        ::close(descriptor_);
        ::unlink(temporary_.c_str());
    }
}

void OutputFile::commit(const std::string& text) {
    write_all(descriptor_, text.data(), text.size(), path_);
    if (::fsync(descriptor_) != 0) {
        fail("write the output", path_);
    }
    if (std::rename(temporary_.c_str(), path_.c_str()) != 0) {
        fail("rename the output into place", path_);
    }
    ::close(descriptor_);
    descriptor_ = -1;
}

void write_all(int descriptor, const void* data, std::size_t num_bytes, const std::string& where) {
    std::size_t done = 0;
    while (done < num_bytes) {
        const ssize_t count = ::write(descriptor, static_cast<const char*>(data) + done, num_bytes - done);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            fail("write", where);
        }
        done += static_cast<std::size_t>(count);
    }
}

}  // namespace meki
