#include "cuda/runtime/launch.cuh"

#include <atomic>
#include <string>

#include "cuda/runtime/range.h"

namespace tilewise::cuda {
namespace {

void raise_limit(const void* kernel, SharedLimits& limits, const Launch& how) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), how.name);
  const std::atomic_ref<std::size_t> limit(limits.bytes[device % 64]);
  if (limit.load() >= how.shared_bytes) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(how.shared_bytes)),
             how.name);
  limit.store(how.shared_bytes);
}

}  // namespace

void launch_untyped(const void* kernel, SharedLimits& limits, const Launch& how, const void** arguments) {
  if (how.blocks == 0) return;
  if (how.blocks > 0x7fffffff) throw DeviceError(std::string(how.name) + ": more than 2^31 - 1 blocks");
  Range range(how.name);
  constexpr std::size_t shared_without_asking = 48 * 1024;
  if (how.shared_bytes > shared_without_asking) raise_limit(kernel, limits, how);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(how.blocks), static_cast<unsigned>(how.layers));
  config.blockDim = dim3(static_cast<unsigned>(how.threads));
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = how.stream;
  config.attrs = &early;
  config.numAttrs = how.early ? 1 : 0;
  check_cuda(cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments)), how.name);
  check_cuda(cudaGetLastError(), how.name);
}

}  // namespace tilewise::cuda
