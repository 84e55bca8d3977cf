#pragma once

#include <cuda_runtime_api.h>

#include "tilewise/error.h"

namespace tilewise::cuda {

/// Throws DeviceError, with `what` was tried. Clears the runtime's error state, so that the next call does
/// not report the error again (one that broke the device stays, and every call reports it).
void check_cuda(cudaError_t status, const char* what);

}  // namespace tilewise::cuda
