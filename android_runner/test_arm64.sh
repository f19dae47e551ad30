#!/bin/sh
# Cross-compiles the harness for 64-bit Arm into BUILD/runner-arm64, runs its C++ tests under qemu, and has
# ONNX Runtime for Arm generate text there: the tokens must be those of this machine.
#
#   test_arm64.sh BUILD PYTHON JSON_INCLUDE
#
# Skips, saying so, where the cross-compiler or qemu is missing. Downloads ONNX Runtime's wheel (23 MB) once.
set -eu

if [ $# -ne 3 ]; then
    echo "usage: test_arm64.sh BUILD PYTHON JSON_INCLUDE" >&2
    exit 2
fi
build=$(cd "$1" && pwd)
python=$2
here=$(cd "$(dirname "$0")" && pwd)
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    if ! command -v $tool >/dev/null; then
        echo "skipped: $tool is missing (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"
        exit 0
    fi
done

# ONNX Runtime crashes when it finds the host's processor in /proc/cpuinfo.
sysroot=$build/arm64-sysroot
mkdir -p "$sysroot/proc"
ln -sfn /usr/aarch64-linux-gnu/lib "$sysroot/lib"
for processor in 0 1 2 3; do
    printf 'processor\t: %d\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: 0xd0b\n' $processor
    printf 'CPU revision\t: 1\nFeatures\t: fp asimd crc32 atomics fphp asimdhp asimdrdm lrcpc asimddp\n\n'
done >"$sysroot/proc/cpuinfo"

cmake -S "$here" -B "$build/runner-arm64" -DCMAKE_BUILD_TYPE=Release --log-level=WARNING \
    -DCMAKE_TOOLCHAIN_FILE="$here/cmake/aarch64-linux-gnu.cmake" -DMEKI_ARM64_SYSROOT="$sysroot" \
    -DMEKI_ORT_HEADERS="$build/ort-headers" -DMEKI_JSON_INCLUDE="$3"
cmake --build "$build/runner-arm64" --parallel "${JOBS:-2}"
ctest --test-dir "$build/runner-arm64" --output-on-failure

version=$("$python" -c 'import importlib.metadata; print(importlib.metadata.version("onnxruntime"))')
ort=$build/arm64-onnxruntime-$version
if [ ! -d "$ort" ]; then
    work=$(mktemp -d "$build/.arm64-onnxruntime.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM
    "$python" -m pip download --quiet --no-deps --only-binary :all: --platform manylinux_2_28_aarch64 \
        --dest "$work" "onnxruntime==$version"
    "$python" -m zipfile -e "$work"/*.whl "$work/unpacked"
    mv -T "$work/unpacked" "$ort"
fi
MEKI_RUNNER_ARM64="$build/runner-arm64/meki-runner" MEKI_ARM64_SYSROOT="$sysroot" \
    MEKI_ORT_ARM64=$(echo "$ort"/onnxruntime/capi/libonnxruntime.so.*) \
    "$python" -m pytest "$here/../tests/device/test_arm64.py" "$here/../tests/phone"
