#pragma once

namespace tilewise::cuda {

/// A barrier of `threads` threads (whole warps) of a block, the others passing by. Number 0 is
/// __syncthreads'.
template <int number, int threads>
__device__ __forceinline__ void sync_some() {
  static_assert(number > 0 && number < 16 && threads % 32 == 0);
  asm volatile("bar.sync %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

}  // namespace tilewise::cuda
