// ONNX Runtime's C++ API, bound at run time.
//
// The library is opened by path, not linked: its symbols are versioned and its file name differs from
// package to package, so one build runs with any of them. Include this header, never ONNX Runtime's.
#pragma once

#include <cstdint>
#include <string>

#define ORT_API_MANUAL_INIT
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wshadow"
#endif
#include <onnxruntime_cxx_api.h>
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

namespace meki {

// Opens the library, once in a process and before any other use of the API; returns its version.
// Throws Error if it cannot be loaded, or is too old.
std::string load_ort(const std::string& library);

// The version of the API in use, which may be older than the headers' one.
std::uint32_t ort_api();

}  // namespace meki
