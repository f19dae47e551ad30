#include "backends.h"

#include "backend_ort.h"

namespace meki {

std::unique_ptr<Backend> make_backend(int threads, const std::optional<QnnConfig>& qnn) {
    if (qnn) {
        return std::make_unique<OrtQnnBackend>(*qnn);
    }
    return std::make_unique<OrtCpuBackend>(threads);
}

}  // namespace meki
