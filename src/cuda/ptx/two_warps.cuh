#pragma once

namespace tilewise::cuda {

// Named barriers of two warps of a CTA. Number 0 is that of __syncthreads.

__device__ __forceinline__ void sync_two_warps(int number) {
  asm volatile("bar.sync %0, 64;" ::"r"(number) : "memory");
}

/// The same; returns whether `value` is true in any thread of the two warps.
__device__ __forceinline__ bool any_of_two_warps(int number, bool value) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred own, all;\n"
      "setp.ne.s32 own, %2, 0;\n"
      "bar.red.or.pred all, %1, 64, own;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}"
      : "=r"(any)
      : "r"(number), "r"(static_cast<int>(value))
      : "memory");
  return any != 0;
}

}  // namespace tilewise::cuda
