#pragma once

#include <span>

#include "core/kernel_list.h"
#include "norm/call.h"

namespace tilewise {

/// One way to compute norms, both kinds.
using NormKernel = Kernel<NormProblem, NormCall>;

/// All kernels, fastest first, the plain reference last. Choosing a kernel walks this list. CUDA kernels are
/// declared below and listed in select.cpp, both under TILEWISE_HAS_CUDA.
std::span<const NormKernel> norm_kernel_list();

#ifdef TILEWISE_HAS_CUDA
namespace cuda {
extern const NormKernel ring_norm;
extern const NormKernel rows_norm;
}  // namespace cuda
#endif

namespace cpu {
extern const NormKernel simd_norm;
extern const NormKernel reference_norm;
}  // namespace cpu

}  // namespace tilewise
