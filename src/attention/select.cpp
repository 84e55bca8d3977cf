#include <array>

#include "attention/kernel.h"

namespace tilewise {

std::span<const AttentionKernel> attention_kernel_list() {
  static const std::array kernels = {
#ifdef TILEWISE_HAS_CUDA
      cuda::wgmma_attention,   cuda::wgmma_halves_attention, cuda::mma_attention,
      cuda::widened_attention, cuda::wide_batched_attention, cuda::wide_attention,
      cuda::fused_attention,   cuda::tiled_attention,        cuda::naive_attention,
#endif
      cpu::simd_attention,     cpu::reference_attention};
  return kernels;
}

const AttentionKernel& choose_attention_kernel(const AttentionProblem& problem, std::string_view name) {
  return choose_kernel(attention_kernel_list(), problem, name);
}

}  // namespace tilewise
