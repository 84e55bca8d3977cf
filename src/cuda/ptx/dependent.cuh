#pragma once

#include <cstdint>

#ifdef TILEWISE_NOTHING_OF_90
#error "of this source 9.0 has the code of 8.0: cmake/TilewiseCode.cmake"
#endif

namespace tilewise::cuda {

// A kernel that begins before the one ahead of it in the stream has ended (sm_90 on), where the launch allows
// it (Launch::early).

/// Waits until the kernel ahead has ended and what it wrote is to be seen. Nothing it may write is read, and
/// nothing it may read is written before. Returns at once where there is none.
__device__ __forceinline__ void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the kernel behind begin, once all blocks have come here.
__device__ __forceinline__ void let_kernel_behind_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// For a kernel of a chain that all begin early: what was ahead is done, and the next may take the places
/// that become free.
__device__ __forceinline__ void take_turn_in_chain() {
  wait_for_kernel_ahead();
  let_kernel_behind_begin();
}

/// Brings bytes, in multiples of 16 and from one on, into the L2 (sm_90 on).
__device__ __forceinline__ void prefetch_l2(const void* from_gmem, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from_gmem), "r"(bytes) : "memory");
#endif
}

}  // namespace tilewise::cuda
