// Any bytes at all are a ROM file whose rows can be read, or an Error: no crash, no read out of bounds.

#include "row_fetcher.h"

#include "temporary.h"

namespace {

const TemporaryDirectory directory;

void fetch_everything(const std::string& path) {
    meki::RowFetcher fetcher(meki::open_reader(meki::RomFile(path), meki::IoMode::pread), 4);
    const meki::RomFile& rom = fetcher.reader().rom();
    const std::size_t places = rom.address().rows_per_token();
    if (places * rom.row_dim() > (std::size_t{1} << 22)) {
        return;  // sound, and too large to be worth the time
    }
    meki::RowTensor out({4, places, rom.row_dim()}, -100, meki::host_allocator());
    const auto last = static_cast<std::uint32_t>(rom.address().num_tokens() - 1);
    const std::uint32_t sequence[] = {0, last, last / 2, 0};
    fetcher.submit(sequence, 0, 4, out);
    fetcher.wait();
    const auto reader = meki::open_reader(meki::RomFile(path), meki::IoMode::pread, 0, rom.has_checksums());
    const std::size_t rows = reader->rom().address().rows_per_run();
    std::vector<std::uint8_t> row(rows * reader->rom().row_dim() * sizeof(float));
    reader->read({0, rows}, meki::RowElement::float16, row.data());
    if (reader->rom().quantization() != nullptr) {
        reader->read({0, rows}, meki::RowElement::raw, row.data());
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string path = directory / "fuzzed.safetensors";
    std::remove(path.c_str());  // cutting a file short makes some file systems write it out at once
    write_file(path, std::string(reinterpret_cast<const char*>(data), size));
    try {
        fetch_everything(path);
        return 0;
    } catch (const meki::Error&) {
        return -1;  // nothing to learn for a corpus
    }
}

#ifndef MEKI_LIBFUZZER

namespace {

struct Random {
    std::uint64_t state = 88172645463325252u;
    std::size_t below(std::size_t limit) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<std::size_t>(state % limit);
    }
};

std::string read_file(const std::string& path) {
    const meki::File file(path);
    return file.read_text(file.size());
}

// Numbers that a careless reader multiplies, adds or casts.
constexpr const char* numbers[] = {"0",          "1",  "-1",  "3",    "4095", "4096",  "2147483647", "4294967296",
                                   "9223372036854775807", "18446744073709551615", "1e9", "0.5", "[]", "null"};

// Another number in place of one in the header, whose padding takes up the difference.
void replace_number(std::string& file, std::size_t header_end, Random& random) {
    const char* const digits = "0123456789";
    const std::size_t begin = file.find_first_of(digits, 8 + random.below(header_end - 8));
    const std::size_t end = std::min(file.find_first_not_of(digits, begin), header_end);
    if (begin >= end) {
        return;
    }
    const std::string number = numbers[random.below(std::size(numbers))];
    const std::size_t old_size = end - begin;
    file.replace(begin, old_size, number);
    if (number.size() > old_size) {
        file.erase(header_end, number.size() - old_size);
    } else {
        file.insert(header_end + number.size() - old_size, old_size - number.size(), ' ');
    }
}

void mutate(std::string& file, Random& random) {
    const std::size_t header_end = std::min<std::size_t>(file.size(), 4096);
    switch (random.below(5)) {
        case 0:
            file[random.below(header_end)] = static_cast<char>(random.below(256));
            break;
        case 1:
            file[random.below(file.size())] = static_cast<char>(random.below(256));
            break;
        case 2:
            file.resize(1 + random.below(file.size()));
            break;
        case 3:
            file.insert(random.below(file.size()), random.below(100), static_cast<char>(random.below(256)));
            break;
        default:
            replace_number(file, header_end, random);
    }
}

}  // namespace

int main() {
    const std::string path = directory / "seed.safetensors";
    std::vector<std::string> seeds;
    write_rom(path, 9, 64, 11);
    seeds.push_back(read_file(path));
    write_ragged_rom(path, {0, 1, 5, 7}, 44, 11);
    seeds.push_back(read_file(path));
    write_hashed_rom(path, {0, 1, 2, 3, 1}, 64, 11);
    seeds.push_back(read_file(path));
    write_static_rom(path, 9, 64, 11);
    add_checksums(path, 22);
    seeds.push_back(read_file(path));
    write_ragged_rom(path, {0, 1, 5, 7}, 44, 11);
    add_checksums(path, 44);
    seeds.push_back(read_file(path));
    Random random;
    int sound = 0;
    constexpr int num_files = 6000;
    for (int i = 0; i < num_files; ++i) {
        std::string file = seeds[static_cast<std::size_t>(i) % seeds.size()];
        for (std::size_t mutations = 1 + random.below(3); mutations > 0 && file.size() > 8; --mutations) {
            mutate(file, random);
        }
        sound += LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(file.data()), file.size()) == 0;
    }
    std::printf("%d of %d files were sound\n", sound, num_files);
    CHECK(sound > num_files / 100 && sound < num_files / 2);
}

#endif
