#pragma once

#include <cstdint>

#ifdef TILEWISE_NOTHING_OF_90
#error "of this source 9.0 has the code of 8.0: cmake/TilewiseCode.cmake"
#endif

namespace tilewise::cuda {

// Programmatic dependent launch (PDL, from sm_90 on): a kernel starts before the previous one in the stream
// has ended, if the launch allows it (Launch::early).

/// Waits until the previous kernel has ended and its writes are visible. Before this wait, a kernel must not
/// read what the previous one may write, nor write what it may read. Returns at once if there is no previous
/// kernel.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel in the stream start, once all CTAs have called this.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// For a chain of kernels that all start early: waits for the previous kernel, then lets the next one start
/// on SMs that become free.
__device__ __forceinline__ void join_pdl_chain() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}

/// Prefetches bytes into the L2 (from sm_90 on). The address and `bytes` are multiples of 16.
__device__ __forceinline__ void prefetch_l2(const void* from_gmem, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from_gmem), "r"(bytes) : "memory");
#endif
}

}  // namespace tilewise::cuda
