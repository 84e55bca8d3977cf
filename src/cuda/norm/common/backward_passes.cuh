#pragma once

#include "cuda/norm/common/backward_partials.cuh"

namespace tilewise::cuda::norm {

// Long rows of 16-bit elements, a block's each: 16 columns a thread, so that what it does for a row besides
// them weighs less. The sums over a row are joined while the next row's are made: its second pass comes a row
// late, and there is one barrier a row. A row's elements are what takes the time, not its bytes: on an H200 a
// multiprocessor can issue about 30 instructions for each element of x that memory brings it. Here is what a
// thread does in either pass; late_kernel and ring_kernel say how rows come to it.

constexpr int late_threads = 512;  // of a multiprocessor: there are registers for 16 columns
constexpr int late_chunks = 2;
constexpr int late_stages = 4;  // two rows ahead, one in its first pass and one in its second

/// The sums of two values over a warp: of the first in lanes 0 to 15, of the second in the others.
__device__ __forceinline__ float sum_halves(float first, float second) {
  const bool upper = threadIdx.x % 32 >= 16;
  return sum_over<16>((upper ? second : first) + __shfl_xor_sync(~0u, upper ? first : second, 16));
}

/// What takes a row's g to its dx, which is rstd·g − n·slope − shift, n being rstd·(x − mean).
template <Norm norm>
struct Correction {
  float rstd, tilt, base;  ///< dx = rstd·g + tilt·x + base

  Correction() = default;
  /// Of a row's mean and rstd and what its warps left, a lane each: sums of g·n of up to 16, and of g.
  __device__ __forceinline__ Correction(const float2& row, float sum, float inverse) : rstd(row.y) {
    sum = sum_over<16>(sum);
    const float slope = rstd * __shfl_sync(~0u, sum, 0) * inverse;
    const float shift = norm == Norm::layer ? rstd * __shfl_sync(~0u, sum, 16) * inverse : 0.0f;
    tilt = -rstd * slope;
    base = -row.x * tilt - shift;
  }
};

/// A thread's columns: their weights and the sums of their gradients over rows.
template <typename T, Norm norm>
struct OwnColumns {
  static constexpr int size = chunk_size<T>;
  static constexpr bool layer = norm == Norm::layer;

  float weight[late_chunks][size], d_weight[late_chunks][size] = {}, d_bias[late_chunks][size] = {};

  /// The first pass over a chunk of a row of that mean and rstd; adds to the row's sums of g·n and of g.
  __device__ __forceinline__ void first_pass(int c, const RawChunk<T>& raw_x, const RawChunk<T>& raw_dy,
                                             const float2& row, float& sum_gn, float& sum_g) {
    const float offset = -row.x * row.y;
    float x[size], g[size];
    raw_x.spread(x);
    raw_dy.spread(g);
#pragma unroll
    for (int e = 0; e < size; ++e) {
      const float normal = layer ? fmaf(x[e], row.y, offset) : x[e] * row.y;
      d_weight[c][e] += g[e] * normal;
      if constexpr (layer) d_bias[c][e] += g[e];
      g[e] *= weight[c][e];
      sum_gn += g[e] * normal;
      if constexpr (layer) sum_g += g[e];
    }
  }

  /// The second pass.
  __device__ __forceinline__ void second_pass(float (&dx)[size], int c, const RawChunk<T>& raw_x,
                                              const RawChunk<T>& raw_dy,
                                              const Correction<norm>& correction) const {
    float x[size];
    raw_x.spread(x);
    raw_dy.spread(dx);
#pragma unroll
    for (int e = 0; e < size; ++e) {
      const float g = dx[e] * weight[c][e];
      dx[e] = fmaf(x[e], correction.tilt,
                   layer ? fmaf(g, correction.rstd, correction.base) : g * correction.rstd);
    }
  }

  __device__ __forceinline__ void leave(const Partials& partials, int count) const {
    leave_partials<T, late_chunks, false>(d_weight, partials.weight, count);
    if constexpr (layer) leave_partials<T, late_chunks, false>(d_bias, partials.bias, count);
  }
};

/// What comes to dx from elsewhere.
template <typename T>
__device__ __forceinline__ void add_chunk(float (&dx)[chunk_size<T>], const RawChunk<T>& more) {
  float added[chunk_size<T>];
  more.spread(added);
#pragma unroll
  for (int e = 0; e < chunk_size<T>; ++e) dx[e] += added[e];
}

}  // namespace tilewise::cuda::norm
