#pragma once

#include <cstdint>

#include "cuda/ptx/matrix.cuh"

namespace tilewise::cuda::mma_f32 {

// An f32 number as the sum of two f16 numbers: x · 2^e = high + low, where low is the rounding error of high,
// rounded itself. Together they have 22 bits and the sign of low. A query row, or a tile of K or V, shares
// one exponent e, which brings its largest number to 2^14 or more. Numbers down to 2^-17 of the largest keep
// all 23 bits; smaller ones lose what is below 2^-40 of it.

/// The exponent of a row or tile whose largest magnitude is `largest`. It is at most 126, so that the power
/// of two is an f32 number; numbers so small that they would need more have fewer digits themselves.
__device__ __forceinline__ int exponent_for(float largest) {
  if (largest == 0) return 0;
  const int exponent = (__float_as_int(largest) >> 23) - 127;  // subnormal numbers count as 2^-127
  return min(14 - exponent, 126);
}

/// 2^exponent, for exponents from -126 to 127.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

/// x · 2^exponent for a positive x. A result below the least normal number becomes that number; one that
/// overflows becomes infinite.
__device__ __forceinline__ float scaled_up_to(float x, int exponent) {
  const int biased = (__float_as_int(x) >> 23) + exponent;
  if (biased < 1) return 1.17549435e-38f;
  if (biased > 254) return __int_as_float(0x7f800000);
  return __int_as_float(__float_as_int(x) + (exponent << 23));
}

struct Pair {
  std::uint32_t high, low;  ///< two numbers each
};
__device__ __forceinline__ Pair split_two(float x, float y) {
  const std::uint32_t high = pack<__half>(x, y);
  const float2 rounded = unpack<__half>(high);
  return {high, pack<__half>(x - rounded.x, y - rounded.y)};
}

/// Counts the numbers of a tile whose parts lose more than rounding does. It does so at three grades of
/// relative loss, and at an eighth of each.
///
/// Lost digits matter where the large numbers of each operand meet only small ones of the other, as in (1,
/// 1e-8)·(1e-8, 1). Then results would be less exact than f32's, and the head is left to the fused kernel.
/// But any data has some numbers near 0 on which nothing depends. Of those, eight times as many lose an
/// eighth of a grade as lose the grade. If nearly as many lose the whole grade, the numbers are not near 0 by
/// chance: the data is that small.
struct Losses {
  unsigned counts[3] = {};  ///< at a grade in the upper 16 bits, at an eighth of it in the lower ones

  /// Numbers of at least this magnitude lose nothing, so they need no counting.
  template <int parts>
  static constexpr float least = parts == 2 ? 0x1p-3f : 0x1p-14f;

  template <int parts>
  __device__ __forceinline__ void add(float x, float high, float low) {
    constexpr float rounding = parts == 2 ? 0x1p-22f : 0x1p-10f;
    constexpr float grades[] = {8 * rounding, parts == 2 ? 0x1p-13f : 0x1p-5f,
                                parts == 2 ? 0x1p-7f : 0x1p-3f};
    const float lost = fabsf(parts == 2 ? (x - high) - low : x - high);
    const float whole = fabsf(x);
    if (!(lost > whole * rounding)) return;
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      counts[n] += (lost > whole * grades[n] ? 0x10000u : 0u) + (lost > whole * grades[n] / 8 ? 1u : 0u);
    }
  }
  /// Fewer such numbers do no harm.
  static constexpr unsigned few = 4;
  __device__ bool harmful() const {
    for (const unsigned count : counts) {
      if (count >> 16 >= few && 3 * (count >> 16) > (count & 0xFFFF)) return true;
    }
    return false;
  }
};

}  // namespace tilewise::cuda::mma_f32
