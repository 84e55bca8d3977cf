#pragma once

#include <span>

#include "core/kernel_list.h"
#include "rope/call.h"

namespace tilewise {

using RopeKernel = Kernel<RopeProblem, RopeCall>;

/// All of them, fastest first, the plain reference last. Choosing walks this list. Kernels of CUDA are
/// declared below and listed in select.cpp under TILEWISE_HAS_CUDA, as those of attention are.
std::span<const RopeKernel> rope_kernel_list();

/// As attention's (attention/kernel.h).
void check_indices(const RopeCall& call, const Context& context);

#ifdef TILEWISE_HAS_CUDA
namespace cuda {
extern const RopeKernel rows_rope;
}
#endif

namespace cpu {
extern const RopeKernel simd_rope;
extern const RopeKernel reference_rope;
}  // namespace cpu

}  // namespace tilewise
