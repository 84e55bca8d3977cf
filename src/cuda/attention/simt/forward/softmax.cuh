#pragma once

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/forward/tile.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::simt {

// The online softmax of a lane's queries.

template <typename C>
struct SoftmaxRow {
  float maximum[C::M];  // from the lowest on
  float sum[C::M];      // over this thread's keys alone, until the end
};

/// In the plain kernel scores are bare products and `unit` is what turns them into the log2 e that exp2
/// takes; in the general one they are finished, in natural units. Maxima are in the units of the scores: then
/// the weight of the highest is 1 to the last bit, and a mask of the lowest finite number does not overflow.
template <bool general>
__device__ __forceinline__ float weight_of(float s, float maximum, float unit) {
  return general ? expf(s - maximum) : exp2_approx((s - maximum) * unit);
}

/// The maximum that weights are relative to is let lie until it is 2^8 too low: a weight may then reach that,
/// the sum loses nothing, and o is hardly ever rescaled. `slack` is that distance in units of scores.
template <typename C, bool general>
__device__ __forceinline__ void softmax(float (&s)[C::M][C::N], float (&o)[C::M][C::V], float unit,
                                        float slack, SoftmaxRow<C>& row) {
  float highest[C::M];  // of the lane's own keys
  bool rises = false;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    highest[m] = s[m][0];
#pragma unroll
    for (int n = 1; n < C::N; ++n) highest[m] = fmaxf(highest[m], s[m][n]);
    rises |= highest[m] > row.maximum[m] + slack;
  }
  if (__any_sync(~0u, rises)) {
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
      const float maximum = fmaxf(row.maximum[m], maximum_over<C::C, C::Lanes::apart>(highest[m]));
      const float rescale = weight_of<general>(row.maximum[m], maximum, unit);
      row.maximum[m] = maximum;
      row.sum[m] *= rescale;
#pragma unroll
      for (int d = 0; d < C::V; ++d) o[m][d] *= rescale;
    }
  }
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      s[m][n] = weight_of<general>(s[m][n], row.maximum[m], unit);
      sum += s[m][n];
    }
    row.sum[m] += sum;
  }
}

/// Takes the second group's sums over to the first: the same lane has the same elements there.
template <typename C, bool general>
__device__ __forceinline__ void join_groups(float (&o)[C::M][C::V], float unit, SoftmaxRow<C>& row, int group,
                                            float* smem) {
  constexpr int lanes = C::group_warps * 32;
  float* own_smem = smem + threadIdx.x % lanes;  // [M, V + 2, lanes]
  __syncthreads();                               // everyone is done with the keys
  if (group == 1) {
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int d = 0; d < C::V; ++d) own_smem[(m * (C::V + 2) + d) * lanes] = o[m][d];
      own_smem[(m * (C::V + 2) + C::V) * lanes] = row.maximum[m];
      own_smem[(m * (C::V + 2) + C::V + 1) * lanes] = row.sum[m];
    }
  }
  __syncthreads();  // they are there
  if (group == 1) return;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const float other = own_smem[(m * (C::V + 2) + C::V) * lanes];
    const float maximum = fmaxf(row.maximum[m], other);
    const float own_factor = weight_of<general>(row.maximum[m], maximum, unit);
    const float other_factor = weight_of<general>(other, maximum, unit);
    row.maximum[m] = maximum;
    row.sum[m] = row.sum[m] * own_factor + own_smem[(m * (C::V + 2) + C::V + 1) * lanes] * other_factor;
#pragma unroll
    for (int d = 0; d < C::V; ++d) {
      o[m][d] = o[m][d] * own_factor + own_smem[(m * (C::V + 2) + d) * lanes] * other_factor;
    }
  }
}

}  // namespace tilewise::cuda::simt
