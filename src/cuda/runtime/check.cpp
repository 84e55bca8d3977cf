#include "cuda/runtime/check.h"

#include <string>

namespace tilewise::cuda {

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw DeviceError(std::string(what) + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) +
                    ")");
}

}  // namespace tilewise::cuda
