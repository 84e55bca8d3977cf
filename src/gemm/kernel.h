#pragma once

#include <span>

#include "core/kernel_list.h"
#include "gemm/call.h"

namespace tilewise {

using GemmKernel = Kernel<GemmProblem, GemmCall>;

/// All kernels, fastest first, the plain reference last. Choosing a kernel walks this list.
///
/// To add a kernel, define `constinit const GemmKernel cuda::NAME_gemm = {.name, .supports, .workspace,
/// .launch}` in src/cuda/…, declare it here, and put it into the list in select.cpp, both under
/// TILEWISE_HAS_CUDA. Its `supports` must return a reason for problems of other devices.
std::span<const GemmKernel> gemm_kernel_list();

#ifdef TILEWISE_HAS_CUDA
namespace cuda {
extern const GemmKernel few_rows_gemm;
extern const GemmKernel cublaslt_gemm;
extern const GemmKernel wgmma_gemm;
extern const GemmKernel split_gemm;
extern const GemmKernel mma_gemm;
extern const GemmKernel simt_gemm;
}  // namespace cuda
#endif

namespace cpu {
extern const GemmKernel simd_gemm;
extern const GemmKernel reference_gemm;
}  // namespace cpu

}  // namespace tilewise
