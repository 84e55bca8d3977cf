#pragma once

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/forward/few_keys_tile.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::simt::few_keys {

// From scores to weights.

// A lane's S (accumulator.cuh).
struct View {
  static constexpr int queries = M;
  static constexpr int keys = N;
  static __device__ __forceinline__ float& at(float (&s)[M][N], int q, int k) { return s[q][k]; }
  static __device__ __forceinline__ constexpr int step(int k) { return in_runs<8>(0, k); }
};

// Hides what the band and the end of the keys hide.
__device__ __forceinline__ void hide(const ShortCall& call, const Work& work, const Place& place,
                                     float (&s)[M][N]) {
  const int first_query = work.first_query - work.first_key + place.side * side_queries;
  const int first_key = place.quarter * quarter_keys;
  const int last_key = first_key + quarter_keys - 1;
  if (last_key < work.key_count && last_key <= first_query + call.right &&
      first_key >= first_query + side_queries - 1 - call.left) {
    return;
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const int i = work.first_query - work.first_key + place.query(m);
    const int first = i - call.left - place.key(0);
    const int last = min(i + call.right + 1, work.key_count) - place.key(0);
    hide_outside<View>(s, m, first, last);
  }
}

// Scores to weights, in shared memory, by the maxima of rows over all quarters.
__device__ __forceinline__ void softmax(const ShortCall& call, const Place& place, float (&s)[M][N],
                                        float* shared) {
  const auto over_row = [](float(&x)[M], const auto& join) {
#pragma unroll
    for (int apart = Lane::apart; apart < 8 * Lane::apart; apart *= 2) {
#pragma unroll
      for (int m = 0; m < M; ++m) x[m] = join(x[m], __shfl_xor_sync(~0u, x[m], apart));
    }
  };
  const auto store_row = [&](const float(&x)[M], float* to) {
    if (place.lane.column != 0) return;
#pragma unroll
    for (int m = 0; m < M; m += 4) {
      store_4(to + place.quarter * queries + place.query(m), float4{x[m], x[m + 1], x[m + 2], x[m + 3]});
    }
  };
  float of_row[M];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    of_row[m] = lowest;
#pragma unroll
    for (int n = 0; n < N; ++n) of_row[m] = fmaxf(of_row[m], s[m][n]);
  }
  over_row(of_row, [](float x, float y) { return fmaxf(x, y); });
  store_row(of_row, shared + maxima_at);
  __syncthreads();  // the maxima of all quarters are there
#pragma unroll
  for (int m = 0; m < M; m += 4) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const float4 other = load_four(shared + maxima_at + quarter * queries + place.query(m));
#pragma unroll
      for (int n = 0; n < 4; ++n) of_row[m + n] = fmaxf(of_row[m + n], element(other, n));
    }
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const float maximum = of_row[m];
    of_row[m] = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      s[m][n] = exp2_approx((s[m][n] - maximum) * call.unit);
      of_row[m] += s[m][n];
    }
  }
#pragma unroll
  for (int m = 0; m < M; m += 4) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      store_4(shared + p_at + Weights::offset(place.key(n)) + place.query(m),
              float4{s[m][n], s[m + 1][n], s[m + 2][n], s[m + 3][n]});
    }
  }
  over_row(of_row, [](float x, float y) { return x + y; });
  store_row(of_row, shared + sums_at);
}

/// What results are to be multiplied by, a query of the warp's side a lane. Writes lse, too.
__device__ __forceinline__ float join_quarters(const ShortCall& call, const Work& work, const Place& place,
                                               const float* shared) {
  const int r = place.side * side_queries + static_cast<int>(threadIdx.x) % 32;
  float maximum = lowest;
  float sum = 0;
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    maximum = fmaxf(maximum, shared[maxima_at + quarter * queries + r]);
    sum += shared[sums_at + quarter * queries + r];
  }
  if (call.lse.data != nullptr && place.warp == place.side && r < work.query_count) {
    *call.lse.first(work.b, work.h, work.first_query + r) =
        sum == 0 ? minus_infinity : fmaxf(maximum * call.scale, lowest) + logf(sum);
  }
  return sum == 0 ? 0.0f : 1 / sum;
}

}  // namespace tilewise::cuda::simt::few_keys
