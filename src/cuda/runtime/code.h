#pragma once

#include <cstddef>

#ifdef TILEWISE_NOTHING_OF_90
#error "of this source 9.0 has the code of 8.0: cmake/TilewiseCode.cmake"
#endif

namespace tilewise::cuda {

// A build may lack code for some GPUs' architectures. The driver decides which of its code runs on a GPU.

/// The architecture of the code that runs on the current device: 80 for sm_80 or its PTX, 0 if this build has
/// no code for it. Throws DeviceError if the device cannot be asked.
int code_architecture();

/// The most shared memory that a CTA can have on GPUs of an architecture.
constexpr std::size_t shared_bytes_of(int architecture) {
  return std::size_t{1024} * (architecture < 80 ? 64 : architecture < 90 ? 163 : 227);
}

/// Whether a kernel with this much shared memory can run with the code that is being compiled. If not, it is
/// never chosen (DeviceProperties), and its body is left out: for older GPUs that is most of the code.
constexpr bool runs_in_code(std::size_t shared_bytes) {
#ifdef __CUDA_ARCH__
  return shared_bytes <= shared_bytes_of(__CUDA_ARCH__ / 10);
#else
  return shared_bytes > 0;
#endif
}

}  // namespace tilewise::cuda
