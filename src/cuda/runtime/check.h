#pragma once

#include <cuda_runtime_api.h>

#include "tilewise/error.h"

namespace tilewise::cuda {

/// Throws DeviceError naming what was tried. The error is taken off the runtime's record, so that the next
/// call is not blamed for it (one that broke the device stays: every call then reports it).
void check_cuda(cudaError_t status, const char* what);

}  // namespace tilewise::cuda
