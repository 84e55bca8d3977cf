#pragma once

#include <span>

#include "core/kernel_list.h"
#include "rope/call.h"

namespace tilewise {

using RopeKernel = Kernel<RopeProblem, RopeCall>;

/// All kernels, fastest first, the plain reference last. Choosing a kernel walks this list. CUDA kernels are
/// declared below and listed in select.cpp, both under TILEWISE_HAS_CUDA.
std::span<const RopeKernel> rope_kernel_list();

/// Checks the contents of index tensors, as attention's check_indices does (attention/kernel.h).
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
