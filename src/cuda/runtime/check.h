#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "tilewise/error.h"

namespace tilewise::cuda {

/// Throws DeviceError naming what was tried.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw DeviceError(std::string(what) + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) +
                    ")");
}

}  // namespace tilewise::cuda
