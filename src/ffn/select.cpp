#include <array>

#include "ffn/kernel.h"

namespace tilewise {

std::span<const FfnKernel> ffn_kernel_list() {
  static const std::array kernels = {
#ifdef TILEWISE_HAS_CUDA
      cuda::few_rows_ffn,
#endif
      chunked_ffn, cpu::reference_ffn};
  return kernels;
}

}  // namespace tilewise
