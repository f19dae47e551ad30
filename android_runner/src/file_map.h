// A whole file, mapped for reading.
#pragma once

#include <cstddef>
#include <cstdint>

#include "file.h"

namespace meki {

class FileMap {
public:
    // Throws Error if the file cannot be mapped.
    explicit FileMap(const File& file);
    ~FileMap();
    FileMap(const FileMap&) = delete;
    FileMap& operator=(const FileMap&) = delete;

    const std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }

    // Asks the kernel to read these bytes now, in one piece.
    void will_need(std::size_t offset, std::size_t num_bytes) const;
    // Says that touches are at random, so that a fault reads its page alone, and none ahead of it.
    void expect_random() const;
    // Unmaps the pages, so that the page cache can drop them; touching them maps them again.
    void release() const;

private:
    std::uint8_t* data_;
    std::size_t size_;
};

}  // namespace meki
