#pragma once

#include <cstdint>

namespace tilewise::cuda {

// What concerns four warps together, or picks one lane (sm_90a).

/// A warpgroup gives registers back, or takes them; each must be done by all its warps, and all warpgroups
/// together must not come to more than the block started with: taking waits until there are as many.
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

/// The lane's number, read anew each time: what is made of it is not kept in registers from before a loop.
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
