#pragma once

namespace tilewise::cuda {

/// A named barrier of `threads` threads (whole warps) of a CTA. Number 0 is that of __syncthreads.
template <int number, int threads>
__device__ __forceinline__ void sync_some() {
  static_assert(number > 0 && number < 16 && threads % 32 == 0);
  asm volatile("bar.sync %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

/// Arrives at such a barrier without waiting: the other threads wait for these, which are whole warps.
template <int number, int threads>
__device__ __forceinline__ void arrive_some() {
  static_assert(number > 0 && number < 16 && threads % 32 == 0);
  asm volatile("bar.arrive %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

/// The same for two warpgroups: one waits by sync_with_arrivals() until the other has called
/// arrive_for_sync(), which does not wait.
__device__ __forceinline__ void sync_with_arrivals(int number) {
  asm volatile("bar.sync %0, 256;" ::"r"(number) : "memory");
}
__device__ __forceinline__ void arrive_for_sync(int number) {
  asm volatile("bar.arrive %0, 256;" ::"r"(number) : "memory");
}

}  // namespace tilewise::cuda
