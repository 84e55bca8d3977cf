#pragma once

#include "cuda/attention/common/backward/peaks.h"
#include "cuda/attention/simt/backward/stage.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::simt {

// Peaks among the pairs of two tiles, and sums over the others: see peaks.h.

/// Puts the peaks among a lane's pairs aside. Places for those of all its rows are asked for at once: each
/// answer comes from global memory.
template <typename C>
__device__ __forceinline__ void take_peaks(const Stage<C, Side::keys, false>& stage, const Peaks& peaks,
                                           const QueryTile& query, const KeyTile& keys,
                                           const Place<C>& place) {
  const std::int64_t first_row =
      query.h * stage.call.rows_q() + stage.call.first_row_q(query.b) + query.first;
  unsigned high[C::M];  // a bit a column
  int next[C::M];
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const int r = place.other(m);
    high[m] = 0;
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      high[m] |= stage.weights[r * C::pair_stride + place.own(n)] > peak_weight ? 1u << n : 0u;
    }
    next[m] = 0;
    if (high[m] != 0) next[m] = atomicAdd(peaks.count + first_row + r, __popc(high[m]));
  }
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const std::int64_t row = first_row + place.other(m);
#pragma unroll 1
    for (; high[m] != 0; high[m] &= high[m] - 1, ++next[m]) {
      const int c = place.own(__ffs(static_cast<int>(high[m])) - 1);
      const int at = place.other(m) * C::pair_stride + c;
      const float weight = stage.weights[at];
      if (next[m] >= most_peaks) {  // lse is far off: as one of the others
        atomicAdd(peaks.rest_weight + row, weight);
        continue;
      }
      peaks.first[row * most_peaks + next[m]] = {keys.first + c, weight, stage.dscores[at] / weight};
      stage.dscores[at] = 0;
    }
  }
}

/// Adds the weights and score gradients of the others to their rows' sums.
template <typename C>
__device__ __forceinline__ void add_others(const Stage<C, Side::keys, false>& stage, const Peaks& peaks,
                                           const QueryTile& query) {
  constexpr int lanes = C::threads / C::tile;  // that share a row
  const int r = static_cast<int>(threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int at = r * C::pair_stride + lane * 4;
  float weight = 0;
  float gradient = 0;
#pragma unroll 4
  for (int c = 0; c < C::tile; c += 4 * lanes) {
    const float4 weights = load_four(stage.weights + at + c);
    const float4 dscores = load_four(stage.dscores + at + c);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float one = element(weights, n);
      weight += one > peak_weight ? 0.0f : one;
      gradient += element(dscores, n);
    }
  }
  weight = sum_over<lanes>(weight);
  gradient = sum_over<lanes>(gradient);
  if (lane != 0 || r >= query.count) return;
  const std::int64_t row = query.h * stage.call.rows_q() + stage.call.first_row_q(query.b) + query.first + r;
  atomicAdd(peaks.rest_weight + row, weight);
  atomicAdd(peaks.rest_gradient + row, gradient);
}

}  // namespace tilewise::cuda::simt
