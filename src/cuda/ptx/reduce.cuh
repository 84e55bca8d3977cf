#pragma once

#ifdef TILEWISE_NOTHING_OF_90
#error "of this source 9.0 has the code of 8.0: cmake/TilewiseCode.cmake"
#endif

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

/// The same for numbers of any magnitude. Atomics in memory flush denormals to 0, both operands and sums;
/// this function adds small numbers by compare-and-swap instead.
__device__ __forceinline__ void add_4_of_any_size(float* to, float4 value) {
  constexpr float small = 0x1p-100f;
  const auto is_small = [](float x) { return x != 0 && fabsf(x) < small; };
  if (!is_small(value.x) && !is_small(value.y) && !is_small(value.z) && !is_small(value.w)) {
    return add_4(to, value);
  }
  const float four[] = {value.x, value.y, value.z, value.w};
#pragma unroll 1
  for (int n = 0; n < 4; ++n) {
    auto* word = reinterpret_cast<unsigned*>(to + n);
    unsigned before = *static_cast<volatile unsigned*>(word), expected;
    do {
      expected = before;
      before = atomicCAS(word, expected, __float_as_uint(__uint_as_float(expected) + four[n]));
    } while (before != expected);
  }
}

}  // namespace tilewise::cuda
