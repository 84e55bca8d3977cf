#pragma once

#include <cstdint>

namespace tilewise::cuda {

// When blocks of a kernel came where, for who looks for time that is lost: with TILEWISE_STAMPS, in programs
// of one source file. Else nothing is there.

#ifdef TILEWISE_STAMPS
inline constexpr int stamped_kernels = 2, stamped_blocks = 264, stamp_points = 12;
__device__ unsigned long long stamps[stamped_kernels][stamped_blocks][stamp_points];
#endif

/// By one thread of a block, at the most once a launch; in nanoseconds.
__device__ __forceinline__ void stamp([[maybe_unused]] int kernel, [[maybe_unused]] int point) {
#ifdef TILEWISE_STAMPS
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  stamps[kernel][blockIdx.y * gridDim.x + blockIdx.x][point] = now;
#endif
}

}  // namespace tilewise::cuda
