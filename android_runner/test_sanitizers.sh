#!/bin/sh
# Builds and runs the C++ tests with AddressSanitizer and UBSan, then with ThreadSanitizer.
#
#   test_sanitizers.sh BUILD JSON_INCLUDE
#
# Skips a sanitizer that the compiler lacks, saying so.
set -eu

if [ $# -ne 2 ]; then
    echo "usage: test_sanitizers.sh BUILD JSON_INCLUDE" >&2
    exit 2
fi
build=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
compiler=${CXX:-c++}
for sanitizers in address,undefined thread; do
    if ! echo 'int main() {}' | $compiler -x c++ -fsanitize=$sanitizers -o /dev/null - 2>/dev/null; then
        echo "skipped: $compiler lacks -fsanitize=$sanitizers (Debian: apt-get install libasan8 libubsan1 libtsan2)"
        continue
    fi
    directory=$build/runner-$(echo $sanitizers | tr , -)
    cmake -S "$here" -B "$directory" -DCMAKE_BUILD_TYPE=Debug -DMEKI_SANITIZE=$sanitizers --log-level=WARNING \
        -DMEKI_ORT_HEADERS="$build/ort-headers" -DMEKI_JSON_INCLUDE="$2"
    cmake --build "$directory" --parallel "${JOBS:-2}"
    ctest --test-dir "$directory" --output-on-failure
done
