#pragma once

#include "cuda/simt/backward_stage.cuh"
#include "cuda/simt/peaks.h"

namespace tilewise::cuda::simt {

// Peaks among the pairs of two tiles, and sums over the others: see peaks.h.

/// Puts the peaks among a lane's pairs aside.
template <typename C>
__device__ __forceinline__ void take_peaks(const Stage<C, Side::keys, false>& stage, const Peaks& peaks,
                                           const QueryTile& query, const KeyTile& keys,
                                           const Place<C>& place) {
  const std::int64_t first_row =
      query.h * stage.call.rows_q() + stage.call.first_row_q(query.b) + query.first;
#pragma unroll 1
  for (int index = 0; index < C::M * C::N; ++index) {
    const int r = place.other(index / C::N);
    const int c = place.own(index % C::N);
    const float weight = stage.weights[r * C::pair_stride + c];
    if (!(weight > peak_weight)) continue;
    float& dscore = stage.dscores[r * C::pair_stride + c];
    const int n = atomicAdd(peaks.count + first_row + r, 1);
    if (n >= most_peaks) {  // lse is far off: as one of the others
      atomicAdd(peaks.rest_weight + first_row + r, weight);
      continue;
    }
    peaks.first[(first_row + r) * most_peaks + n] = {keys.first + c, weight, dscore / weight};
    dscore = 0;
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
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) {
    weight += __shfl_xor_sync(~0u, weight, apart);
    gradient += __shfl_xor_sync(~0u, gradient, apart);
  }
  if (lane != 0 || r >= query.count) return;
  const std::int64_t row = query.h * stage.call.rows_q() + stage.call.first_row_q(query.b) + query.first + r;
  atomicAdd(peaks.rest_weight + row, weight);
  atomicAdd(peaks.rest_gradient + row, gradient);
}

}  // namespace tilewise::cuda::simt
