// The backend that was asked for.
#pragma once

#include <memory>
#include <optional>

#include "backend_qnn.h"

namespace meki {

// ONNX Runtime's CPU provider with so many `threads`, or its QNN provider. `load_ort` comes first.
std::unique_ptr<Backend> make_backend(int threads, const std::optional<QnnConfig>& qnn);

}  // namespace meki
