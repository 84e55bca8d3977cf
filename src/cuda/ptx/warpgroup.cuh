#pragma once

#include <cstdint>

namespace tilewise::cuda {

// Instructions of a warpgroup (sm_90a), and the choice of one lane.

/// A warpgroup gives up registers, or takes more (setmaxnreg). All its warps must execute it. All warpgroups
/// together must not need more registers than the CTA started with: taking waits until enough have been given
/// up.
template <int registers>
__device__ __forceinline__ void keep_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}
template <int registers>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

/// The lane's number, read again at each call, so that nothing derived from it stays in registers across a
/// loop.
__device__ __forceinline__ int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// True in one lane of a whole warp.
__device__ __forceinline__ bool elected() {
#if __CUDA_ARCH__ >= 900
  std::uint32_t chosen;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(chosen));
  return chosen != 0;
#else
  return threadIdx.x % 32 == 0;
#endif
}

}  // namespace tilewise::cuda
