#include "file_map.h"

#include <cerrno>
#include <sys/mman.h>
#include <unistd.h>

#include "error.h"

namespace meki {

FileMap::FileMap(const File& file) : data_(nullptr), size_(static_cast<std::size_t>(file.size())) {
    void* map = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.descriptor(), 0);
    if (map == MAP_FAILED) {
        throw Error("cannot map " + std::to_string(size_) + " bytes: " + describe_errno(errno), file.path(),
                    "check that the file is whole and that memory maps are not limited (ulimit -v)");
    }
    data_ = static_cast<std::uint8_t*>(map);
}

FileMap::~FileMap() { ::munmap(data_, size_); }

void FileMap::will_need(std::size_t offset, std::size_t num_bytes) const {
    static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));  // 16 KB on some phones
    const std::size_t begin = offset / page * page;
    ::madvise(data_ + begin, offset - begin + num_bytes, MADV_WILLNEED);
}

void FileMap::expect_random() const { ::madvise(data_, size_, MADV_RANDOM); }

void FileMap::release() const { ::madvise(data_, size_, MADV_DONTNEED); }

}  // namespace meki
