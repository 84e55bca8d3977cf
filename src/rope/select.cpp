#include <array>

#include "rope/kernel.h"

namespace tilewise {

std::span<const RopeKernel> rope_kernel_list() {
  static const std::array kernels = {
#ifdef TILEWISE_HAS_CUDA
      cuda::rows_rope,
#endif
      cpu::simd_rope, cpu::reference_rope};
  return kernels;
}

}  // namespace tilewise
