#pragma once

namespace tilewise::cuda {

/// What `never` is made of is computed before what comes next, which is a wait for products. ptxas puts plain
/// arithmetic behind waits, whatever the order in the source, but none behind a branch that needs it. No lane
/// ever has `never`.
__device__ __forceinline__ void compute_first(bool never) {
#if __CUDA_ARCH__ >= 700
  if (__any_sync(~0u, never)) asm volatile("nanosleep.u32 1;");
#endif
}

}  // namespace tilewise::cuda
