#pragma once

namespace tilewise::cuda {

/// A barrier of `threads` threads (whole warps) of a block, the others passing by. Number 0 is
/// __syncthreads'.
template <int number, int threads>
__device__ __forceinline__ void sync_some() {
  static_assert(number > 0 && number < 16 && threads % 32 == 0);
  asm volatile("bar.sync %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

/// Arrives at such a barrier and goes on: the others wait for these threads, whole warps, not these for them.
template <int number, int threads>
__device__ __forceinline__ void arrive_some() {
  static_assert(number > 0 && number < 16 && threads % 32 == 0);
  asm volatile("bar.arrive %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

/// The same of two warpgroups, one of which waits until the other has arrived, which goes on.
__device__ __forceinline__ void sync_with_arrivals(int number) {
  asm volatile("bar.sync %0, 256;" ::"r"(number) : "memory");
}
__device__ __forceinline__ void arrive_for_sync(int number) {
  asm volatile("bar.arrive %0, 256;" ::"r"(number) : "memory");
}

}  // namespace tilewise::cuda
