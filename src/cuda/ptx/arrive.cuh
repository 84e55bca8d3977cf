#pragma once

namespace tilewise::cuda {

/// Arrives at a barrier as sync_some has it (barrier.cuh), and goes on: the others wait for these threads,
/// whole warps, not these for them.
template <int number, int threads>
__device__ __forceinline__ void arrive_some() {
  static_assert(number > 0 && number < 16 && threads % 32 == 0);
  asm volatile("bar.arrive %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

}  // namespace tilewise::cuda
