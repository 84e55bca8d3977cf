#pragma once

#include <span>

#include "core/kernel_list.h"
#include "ffn/call.h"

namespace tilewise {

/// One way to compute the network, both passes.
using FfnKernel = Kernel<FfnProblem, FfnCall>;

/// All kernels, fastest first, the plain reference last. Choosing a kernel walks this list. CUDA kernels are
/// declared below and listed in select.cpp, both under TILEWISE_HAS_CUDA.
std::span<const FfnKernel> ffn_kernel_list();

/// Computes the network in chunks, by kernels of gemm's list, on any device that has those and the steps of
/// steps.h.
extern const FfnKernel chunked_ffn;

#ifdef TILEWISE_HAS_CUDA
namespace cuda {
extern const FfnKernel few_rows_ffn;
}
#endif

namespace cpu {
extern const FfnKernel reference_ffn;
}

}  // namespace tilewise
