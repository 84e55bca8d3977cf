#pragma once

#include <cstdint>

#include "cuda/ptx/matrix.cuh"

namespace tilewise::cuda::mma_f32 {

// An f32 number as two of f16: x · 2^e = high + low, each the rest rounded. Together they have 22 bits and
// the sign of low. e is shared by a row of queries, or by a tile of keys or of values, and brings the largest
// number among them to 2^14 or more. Numbers down to 2^-17 of that one keep all 23 bits, smaller ones lose
// what is below 2^-40 of it.

/// The exponent of a row or tile whose largest magnitude this is. Past 126 it would be no f32's own exponent;
/// numbers that would need more have fewer digits themselves.
__device__ __forceinline__ int exponent_for(float largest) {
  if (largest == 0) return 0;
  const int exponent = (__float_as_int(largest) >> 23) - 127;  // subnormal numbers count as 2^-127
  return min(14 - exponent, 126);
}

/// 2^exponent, for exponents from -126 to 127.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

/// x · 2^exponent for a positive x; what would be less than the least normal number is that, what would be
/// too large is infinite.
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

/// How much of a scaled number its parts leave out, beyond what rounding takes from any.
enum class Loss { none, some, much };
template <int parts>
__device__ __forceinline__ Loss loss_of(float x, float high, float low) {
  constexpr float some = parts == 2 ? 0x1p-18f : 0x1p-10f;
  constexpr float much = parts == 2 ? 0x1p-7f : 0x1p-5f;
  const float rest = fabsf(parts == 2 ? (x - high) - low : x - high);
  const float whole = fabsf(x);
  if (rest > whole * much) return Loss::much;
  return rest > whole * some ? Loss::some : Loss::none;
}

// A product of two numbers of which one has lost much matters where the largest of each meet small ones of
// the other alone. There results would be worse than f32's, so heads that may have that are left to the fused
// kernel: those with a number that lost much of itself, a row with two that lost some, or a tile with eight.
// In 32 million normal numbers there are such with a chance of about 1 %.
inline constexpr int row_losses = 2;
inline constexpr int tile_losses = 8;

}  // namespace tilewise::cuda::mma_f32
