#include "probe_methods.h"

#include <cstdint>
#include <fcntl.h>
#include <unistd.h>

#include "buffer.h"
#include "bus_error.h"
#include "error.h"
#include "file_map.h"
#include "row_reader.h"

namespace meki {

namespace {

[[noreturn]] void fail_short(const RomFile& rom) {
    throw Error("the file ends inside a row", rom.file().path(), "copy the file again");
}

// What the bare methods share: the bytes of a run, and the room for the longest.
class BareMethod : public Method {
public:
    explicit BareMethod(const std::string& path)
        : rom_(path), pages_(rom_.run_bytes(rom_.address().rows_per_run()) + 2 * page_bytes) {}

protected:
    RomFile rom_;
    Buffer<std::uint8_t> pages_;
};

class BarePread final : public BareMethod {
public:
    using BareMethod::BareMethod;
    void read(const RowRun& run) override {
        const File& file = rom_.file();
        const std::size_t wanted = rom_.run_bytes(run.count);
        if (read_at(file.descriptor(), pages_.data(), wanted, rom_.row_offset(run.first), file.path()) < wanted) {
            fail_short(rom_);
        }
    }
};

// What reading costs where each layer has a table of its own: the file's bytes are taken as if its segments
// lay one after another, each with all its rows.
class BareLayers final : public BareMethod {
public:
    using BareMethod::BareMethod;
    void read(const RowRun& run) override {
        const File& file = rom_.file();
        std::uint64_t table = rom_.row_offset(0);
        for (const Segment& segment : rom_.segments()) {
            const std::size_t row = segment.codec->num_bytes(segment.dim);
            if (read_at(file.descriptor(), pages_.data(), row * run.count, table + run.first * row, file.path()) == 0) {
                fail_short(rom_);
            }
            table += rom_.num_rows() * row;
        }
    }
};

class BareDirect final : public BareMethod {
public:
    explicit BareDirect(const std::string& path) : BareMethod(path) {
        const int descriptor = rom_.file().descriptor();
        if (::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) | O_DIRECT) != 0) {
            throw Error("the file system does not support O_DIRECT", path, "probe another file system");
        }
    }
    void read(const RowRun& run) override {
        const File& file = rom_.file();
        const std::uint64_t begin = rom_.row_offset(run.first), end = begin + rom_.run_bytes(run.count);
        const std::uint64_t first_page = begin / page_bytes * page_bytes;
        const auto length = static_cast<std::size_t>((end - first_page + page_bytes - 1) / page_bytes * page_bytes);
        if (read_at_once(file.descriptor(), pages_.data(), length, first_page, file.path()) < end - first_page) {
            fail_short(rom_);
        }
    }
};

class BareMap final : public BareMethod {
public:
    enum class Advice { ask_first, none, random };

    BareMap(const std::string& path, Advice advice) : BareMethod(path), map_(rom_.file()), advice_(advice) {
        install_bus_error_handler();
        if (advice == Advice::random) {
            map_.expect_random();
        }
    }
    void read(const RowRun& run) override {
        const auto offset = static_cast<std::size_t>(rom_.row_offset(run.first));
        const std::size_t length = rom_.run_bytes(run.count);
        if (advice_ == Advice::ask_first) {
            map_.will_need(offset, length);
        }
        Touch touch{map_.data() + offset, length, 0};
        if (!touch_mapped([](void* context) { static_cast<Touch*>(context)->run(); }, &touch)) {
            fail_short(rom_);
        }
    }
    void release() override { map_.release(); }

private:
    struct Touch {
        const std::uint8_t* data;
        std::size_t length;
        volatile unsigned sum;
        void run() {
            for (std::size_t i = 0; i < length; i += page_bytes) {
                sum = sum + data[i];
            }
            sum = sum + data[length - 1];
        }
    };

    FileMap map_;
    Advice advice_;
};

class Fetch final : public Method {
public:
    Fetch(const std::string& path, IoMode mode)
        : reader_(open_reader(RomFile(path), mode)),
          out_(reader_->rom().address().rows_per_run() * reader_->rom().row_dim()) {}
    void read(const RowRun& run) override { reader_->read(run, out_.data()); }
    void release() override { reader_->drop_page_cache(); }

private:
    std::unique_ptr<RowReader> reader_;
    std::vector<float> out_;
};

}  // namespace

const std::vector<NamedMethod>& named_methods() {
    static const std::vector<NamedMethod> methods = {
        {"pread", [](const std::string& path) { return std::make_unique<BarePread>(path); }},
        {"direct", [](const std::string& path) { return std::make_unique<BareDirect>(path); }},
        {"mmap", [](const std::string& path) { return std::make_unique<BareMap>(path, BareMap::Advice::ask_first); }},
        {"faults", [](const std::string& path) { return std::make_unique<BareMap>(path, BareMap::Advice::none); }},
        {"random faults",
         [](const std::string& path) { return std::make_unique<BareMap>(path, BareMap::Advice::random); }},
        {"layers", [](const std::string& path) { return std::make_unique<BareLayers>(path); }},
        {"fetch pread", [](const std::string& path) { return std::make_unique<Fetch>(path, IoMode::pread); }},
        {"fetch direct", [](const std::string& path) { return std::make_unique<Fetch>(path, IoMode::direct); }},
        {"fetch mmap", [](const std::string& path) { return std::make_unique<Fetch>(path, IoMode::mmap); }},
    };
    return methods;
}

bool supports_direct(const std::string& path) {
    try {
        const BareDirect direct(path);
        return true;
    } catch (const Error&) {
        return false;
    }
}

}  // namespace meki
