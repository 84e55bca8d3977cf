#pragma once

#include <cstddef>

#ifdef TILEWISE_NOTHING_OF_90
#error "of this source 9.0 has the code of 8.0: cmake/TilewiseCode.cmake"
#endif

namespace tilewise::cuda {

// A build may have code for fewer architectures than there are GPUs: which of it runs on one is for the
// driver to say.

/// The architecture that the code which runs on the current device was compiled for: 80 for sm_80 or its PTX.
/// 0 where there is none. Throws DeviceError where the device cannot be asked.
int code_architecture();

/// The most shared memory that a block may have on GPUs of an architecture.
constexpr std::size_t shared_bytes_of(int architecture) {
  return std::size_t{1024} * (architecture < 80 ? 64 : architecture < 90 ? 163 : 227);
}

/// Whether a kernel of so much shared memory can run by the code that is being compiled. Where it cannot, it
/// is not chosen (DeviceProperties), and its body is left out: for older GPUs that is most of what would be
/// compiled.
constexpr bool runs_in_code(std::size_t shared_bytes) {
#ifdef __CUDA_ARCH__
  return shared_bytes <= shared_bytes_of(__CUDA_ARCH__ / 10);
#else
  return shared_bytes > 0;
#endif
}

}  // namespace tilewise::cuda
