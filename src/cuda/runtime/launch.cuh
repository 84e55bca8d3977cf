#pragma once

#include <atomic>
#include <cstdint>

#include "cuda/runtime/check.h"
#include "cuda/runtime/range.h"

namespace tilewise::cuda {

/// How a kernel is launched. The name is what errors and profiles call it.
struct Launch {
  const char* name;
  std::int64_t blocks;
  int threads;
  int layers = 1;  ///< of so many blocks: the grid's second dimension
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
  bool early = false;  ///< may begin before the kernel ahead has ended, which it waits for itself (sm_90 on)
};

/// The one way to launch: raises the limit of shared memory where needed (for a kernel and device), marks a
/// range and throws DeviceError with the kernel's name when the launch fails. No blocks, no launch.
template <auto kernel, typename... Arguments>
void launch(const Launch& how, const Arguments&... arguments) {
  if (how.blocks == 0) return;
  if (how.blocks > 0x7fffffff) throw DeviceError(std::string(how.name) + ": more than 2^31 - 1 blocks");
  Range range(how.name);
  constexpr std::size_t shared_without_asking = 48 * 1024;
  if (how.shared_bytes > shared_without_asking) {
    static std::atomic<std::size_t> raised[64] = {};  // to how many bytes, by device
    int device = 0;
    check_cuda(cudaGetDevice(&device), how.name);
    std::atomic<std::size_t>& limit = raised[device % 64];
    if (limit.load() < how.shared_bytes) {
      check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(how.shared_bytes)),
                 how.name);
      limit.store(how.shared_bytes);
    }
  }
  if (!how.early) {
    const dim3 grid(static_cast<unsigned>(how.blocks), static_cast<unsigned>(how.layers));
    kernel<<<grid, static_cast<unsigned>(how.threads), how.shared_bytes, how.stream>>>(arguments...);
  } else {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(how.blocks), static_cast<unsigned>(how.layers));
    config.blockDim = dim3(static_cast<unsigned>(how.threads));
    config.dynamicSmemBytes = how.shared_bytes;
    config.stream = how.stream;
    config.attrs = &early;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), how.name);
  }
  check_cuda(cudaGetLastError(), how.name);
}

}  // namespace tilewise::cuda
