#pragma once

namespace tilewise::cuda {

/// Adds four consecutive floats in global memory, in no particular order with other threads; the address is a
/// multiple of 16.
__device__ __forceinline__ void add_4(float* to, float4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
#else
  atomicAdd(to, value.x);
  atomicAdd(to + 1, value.y);
  atomicAdd(to + 2, value.z);
  atomicAdd(to + 3, value.w);
#endif
}

}  // namespace tilewise::cuda
