#include "cuda/runtime/launch.cuh"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <atomic>
#include <mutex>
#include <string>

#include "cuda/runtime/range.h"

namespace tilewise::cuda {
namespace {

// The driver's launch function, which takes less host time than the runtime's. Null if it cannot be found.
PFN_cuLaunchKernelEx_v11060 driver_launch() {
  static const PFN_cuLaunchKernelEx_v11060 function = [] {
    constexpr unsigned since = 11060;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &found, since, cudaEnableDefault, &result);
    const bool exists = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return exists ? reinterpret_cast<PFN_cuLaunchKernelEx_v11060>(found) : nullptr;
  }();
  return function;
}

// The driver's handle of a kernel, or null. All threads share it. In a thread without a context the driver
// refuses to launch; the runtime then launches the kernel and makes the device's context current.
CUfunction function_of(const void* kernel, KnownKernel& known, int device) {
  std::atomic<cudaFunction_t>& place = known.function[device % KnownKernel::devices];
  cudaFunction_t function = place.load(std::memory_order_acquire);
  if (function == nullptr) {
    if (cudaGetFuncBySymbol(&function, kernel) != cudaSuccess) {
      cudaGetLastError();  // clears the error: the launch itself will report it
      return nullptr;
    }
    place.store(function, std::memory_order_release);
  }
  return function;
}

// Raises a kernel's limit of shared memory. The mutex keeps the limit from falling if threads raise it to
// different sizes.
void raise_limit(const void* kernel, KnownKernel& known, int device, const Launch& how) {
  static std::mutex mutex;
  std::atomic<std::size_t>& limit = known.shared_limit[device % KnownKernel::devices];
  if (limit.load() >= how.shared_bytes) return;
  const std::lock_guard lock(mutex);
  if (limit.load() >= how.shared_bytes) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(how.shared_bytes)),
             how.name);
  // An SM splits its memory between the L1 and shared memory as the running kernel asked for.
  if (how.beside) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared),
               how.name);
  }
  limit.store(how.shared_bytes);
}

bool launch_by_driver(CUfunction function, const Launch& how, const void** arguments) {
  CUlaunchAttribute early{};
  early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  early.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(how.blocks);
  config.gridDimY = static_cast<unsigned>(how.layers);
  config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(how.threads);
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(how.shared_bytes);
  config.hStream = how.stream;
  config.attrs = &early;
  config.numAttrs = how.early ? 1 : 0;
  return driver_launch()(&config, function, const_cast<void**>(arguments), nullptr) == CUDA_SUCCESS;
}

}  // namespace

void launch_untyped(const void* kernel, KnownKernel& known, const Launch& how, const void** arguments) {
  if (how.blocks == 0) return;
  if (how.blocks > 0x7fffffff) throw DeviceError(std::string(how.name) + ": more than 2^31 - 1 blocks");
  Range range(how.name);
  int device = 0;
  check_cuda(cudaGetDevice(&device), how.name);
  constexpr std::size_t shared_without_asking = 48 * 1024;
  if (how.shared_bytes > shared_without_asking) raise_limit(kernel, known, device, how);
  const CUfunction function = driver_launch() == nullptr ? nullptr : function_of(kernel, known, device);
  if (function != nullptr && launch_by_driver(function, how, arguments)) return;
  // If the driver refuses the launch, the runtime either launches or gives the reason.
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
