#pragma once

#include "cuda/attention/sm80/backward_f32/block.cuh"

namespace tilewise::cuda::mma_f32 {

// Pairs of large weight are put aside, and sums over the others are found beside them.

/// Puts the peaks among the warp's pairs aside: they take no part in dq and dk. `power` is the scale of
/// score gradients over that of weights.
template <auto c>
__device__ __forceinline__ void take_peaks(const BackwardBlock<c>& block, float (&dscores)[1][c.keys / 8][4],
                                           float (&weights)[1][c.keys / 8][4], std::int64_t first_row,
                                           float power) {
#pragma unroll
  for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float weight = weights[0][n][e] * power_of_two(-weight_bits);
      if (!(weight > simt::peak_weight)) continue;
      const std::int64_t row = first_row + 8 * n + 2 * (block.lane % 4) + e % 2;
      const int count = atomicAdd(block.space.peaks.count + row, 1);
      if (count >= simt::most_peaks) {  // lse is far off: as one of the others
        atomicAdd(block.space.peaks.rest_weight + row, weight);
        continue;
      }
      simt::Peak& peak = block.space.peaks.first[row * simt::most_peaks + count];
      peak.key = block.first_key + block.warp * 16 + e / 2 * 8 + block.lane / 4;
      peak.weight = weight;
      peak.gradient = dscores[0][n][e] / weights[0][n][e] / power;
      dscores[0][n][e] = 0;
    }
  }
}

/// Of 2 · count numbers adds up one half with those of the lane 2 · count away, which takes the other
/// half; gives the first of them.
template <int count>
__device__ __forceinline__ int exchange(float (&each)[16], int lane) {
  const bool upper = (lane & 2 * count) != 0;
#pragma unroll
  for (int n = 0; n < count; ++n) {
    const float other = __shfl_xor_sync(~0u, upper ? each[n] : each[n + count], 2 * count);
    each[n] = (upper ? each[n + count] : each[n]) + other;
  }
  return upper ? count : 0;
}

/// Sums of weights and of score gradients over the warp's keys that are no peaks, a query each. Of 16
/// numbers each lane has, eight lanes share the adding: half of them are exchanged in every step.
template <auto c>
__device__ __forceinline__ void find_sums(const BackwardBlock<c>& block,
                                          const float (&dscores)[1][c.keys / 8][4],
                                          const float (&weights)[1][c.keys / 8][4], bool peaks) {
  float each[16];  // by what it is, queries n and e
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      each[2 * n + e] = weights[0][n][e] + weights[0][n][2 + e];
      each[8 + 2 * n + e] = dscores[0][n][e] + dscores[0][n][2 + e];
    }
  }
  if (peaks) {
    const auto low = [](float x) { return x * power_of_two(-weight_bits) > simt::peak_weight ? 0.0f : x; };
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) each[2 * n + e] = low(weights[0][n][e]) + low(weights[0][n][2 + e]);
    }
  }
  const int first = exchange<8>(each, block.lane) + exchange<4>(each, block.lane) +
                    exchange<2>(each, block.lane);  // of those left to the lane
  // The two that are left are of neighbouring queries.
  float* to =
      block.sums_smem + (2 * block.warp + first / 8) * c.keys + first % 8 / 2 * 8 + 2 * (block.lane % 4);
  *reinterpret_cast<float2*>(to) = {each[0], each[1]};
}

/// Adds up what all warps found, when it is there, for everyone's queries.
template <auto c>
__device__ __forceinline__ void add_sums(const BackwardBlock<c>& block, const QueriesAt& at, int exponent) {
  if (block.warp >= 2 || at.first + block.lane >= block.sequence.length_q) return;
  float sum = 0;
#pragma unroll
  for (int n = 0; n < c.warps; ++n) sum += block.sums_smem[(2 * n + block.warp) * c.keys + block.lane];
  float* to = (block.warp == 0 ? block.space.peaks.rest_weight : block.space.peaks.rest_gradient) + at.row +
              block.lane;
  const int bits = block.warp == 0 ? weight_bits : exponent;
  atomicAdd(to, sum * power_of_two(-bits / 2) * power_of_two(bits / 2 - bits));
}

}  // namespace tilewise::cuda::mma_f32
