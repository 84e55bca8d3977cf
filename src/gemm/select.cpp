#include <array>

#include "gemm/kernel.h"

namespace tilewise {

std::span<const GemmKernel> gemm_kernel_list() {
  static const std::array kernels = {cpu::simd_gemm, cpu::reference_gemm};
  return kernels;
}

}  // namespace tilewise
