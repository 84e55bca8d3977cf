#include <array>

#include "norm/kernel.h"

namespace tilewise {

std::span<const NormKernel> norm_kernel_list() {
  static const std::array kernels = {
#ifdef TILEWISE_HAS_CUDA
      cuda::ring_norm, cuda::rows_norm,
#endif
      cpu::simd_norm, cpu::reference_norm};
  return kernels;
}

}  // namespace tilewise
