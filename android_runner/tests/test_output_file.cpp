// The file is whole or absent, and a bad path is found before the work is done.

#include "output_file.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include "file.h"
#include "temporary.h"

namespace {

const TemporaryDirectory directory;

int num_files() {
    DIR* listing = ::opendir((directory / "").c_str());
    int count = 0;
    while (const dirent* entry = ::readdir(listing)) {
        count += entry->d_name[0] != '.' || std::string(entry->d_name).size() > 2 ? 1 : 0;
    }
    ::closedir(listing);
    return count;
}

}  // namespace

int main() {
    const std::string path = directory / "out.json";
    {
        meki::OutputFile abandoned(path);
        CHECK(num_files() == 1);
    }
    CHECK(num_files() == 0);
    for (const char* text : {"first", "second, longer"}) {
        meki::OutputFile output(path);
        output.commit(text);
        CHECK(num_files() == 1);
        CHECK(meki::File(path).read_text(100) == text);
    }
    CHECK_ERROR(meki::File(path).read_text(3), "more than the 3");
    const std::string link = directory / "link.json";
    CHECK(::symlink("out.json", link.c_str()) == 0);
    {
        meki::OutputFile output(link);
        output.commit("through a link");
    }
    struct stat status {};
    CHECK(::lstat(link.c_str(), &status) == 0 && S_ISLNK(status.st_mode));
    CHECK(meki::File(path).read_text(100) == "through a link");
    const std::string made = directory / "made.json", dangling = directory / "dangling.json";
    CHECK(::symlink(made.c_str(), dangling.c_str()) == 0);
    {
        meki::OutputFile output(dangling);
        output.commit("made");
    }
    CHECK(::lstat(dangling.c_str(), &status) == 0 && S_ISLNK(status.st_mode));
    CHECK(meki::File(made).read_text(100) == "made");
    const std::string pipe = directory / "pipe";
    CHECK(::mkfifo(pipe.c_str(), 0600) == 0);
    CHECK_ERROR(meki::OutputFile{pipe}, "not a regular file");
    CHECK_ERROR(meki::OutputFile{directory / ""}, "not a regular file");
    CHECK(num_files() == 5);
    CHECK_ERROR(meki::OutputFile(directory / "absent/out.json"), "cannot write the output: No such file");
    CHECK_ERROR(meki::write_all(-1, "x", 1, "nowhere"), "cannot write: Bad file descriptor [nowhere]");
}
