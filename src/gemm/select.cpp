#include <array>

#include "gemm/kernel.h"

namespace tilewise {

std::span<const GemmKernel> gemm_kernel_list() {
  static const std::array kernels = {
#ifdef TILEWISE_HAS_CUDA
      cuda::few_rows_gemm, cuda::cublaslt_gemm, cuda::wgmma_gemm,
      cuda::split_gemm,    cuda::mma_gemm,      cuda::simt_gemm,
#endif
      cpu::simd_gemm,      cpu::reference_gemm};
  return kernels;
}

}  // namespace tilewise
