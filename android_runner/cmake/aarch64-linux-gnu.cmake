# Cross-compiles for 64-bit Arm Linux with Debian's g++-aarch64-linux-gnu, and runs the tests under qemu-user.
#
# MEKI_ARM64_SYSROOT: what qemu takes for the root of the file system, with `lib` and, for ONNX Runtime (which
# reads the processor's kind from it), an Arm-looking `proc/cpuinfo`; see `make test-arm64`.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(MEKI_ARM64_SYSROOT /usr/aarch64-linux-gnu CACHE PATH "Root of the file system under qemu")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu cortex-a76 -L "${MEKI_ARM64_SYSROOT}")
