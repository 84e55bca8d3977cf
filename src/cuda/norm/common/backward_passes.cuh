#pragma once

#include "cuda/norm/common/backward_partials.cuh"

namespace tilewise::cuda::norm {

// Backward of long rows of 16-bit elements. A CTA has a row at a time, a thread 16 columns of it, so that the
// work per row that does not depend on columns weighs less. A row takes two passes: the first sums g and g·x̂
// over the row, the second computes dx from these sums. The passes are pipelined: one step of the
// loop has the first pass of a row and the second pass of the row before, so there is one barrier per row.
//
// Instructions per element limit the speed, not bytes: on an H200 an SM can issue about 30 instructions in
// the time in which memory delivers one element of x. This file has what a thread does in each pass;
// pipelined_kernel (simt/backward.cu) and ring_kernel (sm90/backward_ring.cu) say how rows are loaded.

constexpr int pipelined_threads = 512;  // of an SM: there are registers for 16 columns each
constexpr int pipelined_chunks = 2;     // of a thread
constexpr int pipelined_stages = 4;     // two rows being loaded, one in its first pass and one in its second

/// The sums of two values over a warp: of `first` in lanes 0 to 15, of `second` in the others.
__device__ __forceinline__ float sum_halves(float first, float second) {
  const bool upper = threadIdx.x % 32 >= 16;
  return sum_over<16>((upper ? second : first) + __shfl_xor_sync(~0u, upper ? first : second, 16));
}

/// The terms that lead from a row's g to its dx: dx = rstd·g − slope·x̂ − shift, where x̂ = rstd·(x − mean),
/// slope = rstd·mean(g·x̂) and shift = rstd·mean(g).
template <Norm norm>
struct Correction {
  float rstd, slope_x, base;  ///< dx = rstd·g + slope_x·x + base

  Correction() = default;
  /// `row` is mean and rstd. `sum` is warp n's sum over the row: of g·x̂ in lane n, of g in lane 16 + n.
  __device__ __forceinline__ Correction(const float2& row, float sum, float inverse_dim) : rstd(row.y) {
    sum = sum_over<16>(sum);
    const float slope = rstd * __shfl_sync(~0u, sum, 0) * inverse_dim;
    const float shift = norm == Norm::layer ? rstd * __shfl_sync(~0u, sum, 16) * inverse_dim : 0.0f;
    slope_x = -rstd * slope;
    base = -row.x * slope_x - shift;
  }
};

/// A thread's columns: the weight, and the gradients of weight and bias summed over rows.
template <typename T, Norm norm>
struct OwnColumns {
  static constexpr int size = chunk_size<T>;
  static constexpr bool layer = norm == Norm::layer;

  float weight[pipelined_chunks][size];
  float d_weight[pipelined_chunks][size] = {};
  float d_bias[pipelined_chunks][size] = {};

  /// The first pass over chunk c of a row with this mean and rstd. Adds to the row's sums of g·x̂ and of g.
  __device__ __forceinline__ void first_pass(int c, const RawChunk<T>& raw_x, const RawChunk<T>& raw_dy,
                                             const float2& row, float& sum_gx, float& sum_g) {
    const float offset = -row.x * row.y;
    float x[size], g[size];
    raw_x.spread(x);
    raw_dy.spread(g);
#pragma unroll
    for (int e = 0; e < size; ++e) {
      const float x_hat = layer ? fmaf(x[e], row.y, offset) : x[e] * row.y;
      d_weight[c][e] += g[e] * x_hat;
      if constexpr (layer) d_bias[c][e] += g[e];
      g[e] *= weight[c][e];
      sum_gx += g[e] * x_hat;
      if constexpr (layer) sum_g += g[e];
    }
  }

  /// The second pass: dx of chunk c.
  __device__ __forceinline__ void second_pass(float (&dx)[size], int c, const RawChunk<T>& raw_x,
                                              const RawChunk<T>& raw_dy,
                                              const Correction<norm>& correction) const {
    float x[size];
    raw_x.spread(x);
    raw_dy.spread(dx);
#pragma unroll
    for (int e = 0; e < size; ++e) {
      const float g = dx[e] * weight[c][e];
      dx[e] = fmaf(x[e], correction.slope_x,
                   layer ? fmaf(g, correction.rstd, correction.base) : g * correction.rstd);
    }
  }

  __device__ __forceinline__ void store(const Partials& partials, int count) const {
    store_partials<T, pipelined_chunks, false>(d_weight, partials.weight, count);
    if constexpr (layer) store_partials<T, pipelined_chunks, false>(d_bias, partials.bias, count);
  }
};

/// Adds a chunk of d_sum, the gradient that reaches dx from elsewhere.
template <typename T>
__device__ __forceinline__ void add_chunk(float (&dx)[chunk_size<T>], const RawChunk<T>& addend) {
  float added[chunk_size<T>];
  addend.spread(added);
#pragma unroll
  for (int e = 0; e < chunk_size<T>; ++e) dx[e] += added[e];
}

}  // namespace tilewise::cuda::norm
