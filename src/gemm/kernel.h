#pragma once

#include <span>

#include "gemm/call.h"

namespace tilewise {

using GemmKernel = Kernel<GemmProblem, GemmCall>;

/// All of them, fastest first, the plain reference last. Choosing walks this list.
///
/// A new kernel: define `constinit const GemmKernel cuda::NAME_gemm = {.name, .supports, .workspace,
/// .launch}` in src/cuda/…, declare it here, and put it into the list in select.cpp; both under
/// TILEWISE_HAS_CUDA. `supports` says why not for problems of other devices.
std::span<const GemmKernel> gemm_kernel_list();

namespace cpu {
extern const GemmKernel simd_gemm;
extern const GemmKernel reference_gemm;
}  // namespace cpu

}  // namespace tilewise
