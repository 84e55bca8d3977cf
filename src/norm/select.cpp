#include <array>

#include "norm/kernel.h"

namespace tilewise {

std::span<const NormKernel> norm_kernel_list() {
  static const std::array kernels = {cpu::simd_norm, cpu::reference_norm};
  return kernels;
}

}  // namespace tilewise
