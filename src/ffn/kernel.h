#pragma once

#include <span>

#include "core/kernel_list.h"
#include "ffn/call.h"

namespace tilewise {

/// One way to compute the network, both passes.
using FfnKernel = Kernel<FfnProblem, FfnCall>;

/// All of them, fastest first, the plain reference last. Choosing walks this list. Kernels of CUDA are
/// declared below and listed in select.cpp under TILEWISE_HAS_CUDA, as those of attention are.
std::span<const FfnKernel> ffn_kernel_list();

/// Products of the gemm list over chunks, on any device that has them and the steps of steps.h.
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
