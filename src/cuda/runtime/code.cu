#include "cuda/runtime/code.h"

#include <cuda_runtime_api.h>

#include "cuda/runtime/check.h"

namespace tilewise::cuda {
namespace {

__global__ void any_kernel() {}

}  // namespace

int code_architecture() {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, any_kernel);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();  // clears the error, which the next call would report otherwise
    return 0;
  }
  check_cuda(status, "asking which code a CUDA device runs");
  return attributes.ptxVersion;
}

}  // namespace tilewise::cuda
