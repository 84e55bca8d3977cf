#pragma once

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm80/backward_f32/block.cuh"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda::mma_f32 {

// Pairs of a warp's keys and of a tile of queries: weights, gradients of scores, and both as operands.

/// Weights of the pairs, times 2^weight_bits, from products k·q.
template <auto c>
__device__ __forceinline__ void weigh(const BackwardBlock<c>& block, float (&s)[1][c.keys / 8][4], float unit,
                                      const float* values) {
#pragma unroll
  for (int n = 0; n < c.keys / 8; ++n) {
    const float2 top = block.two_of(values, n);
    const float2 factor = block.two_of(values + c.keys, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& one = s[0][n][e];
      one = exp2_approx(fmaf(one, unit, e % 2 == 0 ? -top.x : -top.y)) * (e % 2 == 0 ? factor.x : factor.y);
    }
  }
}

/// Makes those that are hidden 0.
template <auto c>
__device__ __forceinline__ void hide(const BackwardBlock<c>& block, float (&s)[1][c.keys / 8][4],
                                     int first_query) {
  const int key = block.warp * 16 + block.lane / 4;  // the first of two, of the block's
  using View = MmaTransposedView<float[1][c.keys / 8][4]>;
#pragma unroll
  for (int q = 0; q < View::queries; ++q) {
    const KeyRange range =
        block.call.keys_of(block.sequence, first_query + 8 * (q / 2) + 2 * (block.lane % 4) + q % 2);
    const auto first = static_cast<int>(max(range.first - block.first_key, std::int64_t{0}));
    const auto last = static_cast<int>(min(range.last - block.first_key, std::int64_t{c.own()}));
    hide_outside<View>(s, q, first, last, 0.0f, key);
  }
}

/// Gradients of scores from weights and products v·d_o: weight·(unit·product + shift), `unit` and `power`
/// having the scale of the result.
template <auto c>
__device__ __forceinline__ void differentiate(const BackwardBlock<c>& block, float (&dp)[1][c.keys / 8][4],
                                              const float (&weights)[1][c.keys / 8][4], float unit,
                                              float power, const float* values) {
#pragma unroll
  for (int n = 0; n < c.keys / 8; ++n) {
    const float2 shift = block.two_of(values + 2 * c.keys, n);
    const float scaled[2] = {shift.x * power, shift.y * power};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      dp[0][n][e] = weights[0][n][e] * fmaf(dp[0][n][e], unit, scaled[e % 2]);
    }
  }
}

template <auto c>
__device__ __forceinline__ void split_pairs(Weights<c>& to, const float (&from)[1][c.keys / 8][4]) {
#pragma unroll
  for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // eight queries n / 2 of the step, half n % 2 of the keys
      const float(&four)[4] = from[0][2 * step + n / 2];
      const Pair two = split_two(four[2 * (n % 2)], four[2 * (n % 2) + 1]);
      to[step][0][0][n] = two.high;
      to[step][0][1][n] = two.low;
    }
  }
}

/// Puts the warp's score gradients where all can read them.
template <auto c>
__device__ __forceinline__ void store_pairs(const BackwardBlock<c>& block, const Weights<c>& pairs) {
#pragma unroll
  for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
    for (int part = 0; part < c.parts; ++part) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = block.warp * 16 + n % 2 * 8 + block.lane / 4;
        *reinterpret_cast<std::uint32_t*>(block.pairs_smem + part * c.pair_part_bytes() +
                                          BackwardBlock<c>::PairTile::offset(row, 2 * step + n / 2) +
                                          4 * (block.lane % 4)) = pairs[step][0][part][n];
      }
    }
  }
}

}  // namespace tilewise::cuda::mma_f32
