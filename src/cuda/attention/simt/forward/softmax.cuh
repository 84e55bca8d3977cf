#pragma once

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/forward/tile.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::simt {

// The online softmax of a lane's rows of S.

template <typename C>
struct SoftmaxRow {
  float maximum[C::M];  // starts at `lowest`
  float sum[C::M];      // over this thread's keys; the kernel sums over threads at its end
};

/// exp(s − maximum): an element of P before the division by the row's sum. In the plain kernel `s` is the
/// bare product q·k, and `unit` is the factor that converts it for exp2; in the general kernel `s` is the
/// score in natural units. The maximum has the unit of `s`, so the largest element is exactly 1, and a mask
/// of the lowest finite number does not overflow.
template <bool general>
__device__ __forceinline__ float exponential(float s, float maximum, float unit) {
  return general ? expf(s - maximum) : exp2_approx((s - maximum) * unit);
}

/// Replaces S of a tile by P before the division. The maximum is raised only when it is too low by a factor
/// of 2^8: elements of P may then be up to 2^8, the sum loses no accuracy, and O is hardly ever rescaled.
/// `slack` is that distance in the unit of S.
template <typename C, bool general>
__device__ __forceinline__ void softmax(float (&s)[C::M][C::N], float (&o)[C::M][C::V], float unit,
                                        float slack, SoftmaxRow<C>& row) {
  float highest[C::M];  // maxima over the lane's own keys
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
      const float rescale = exponential<general>(row.maximum[m], maximum, unit);
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
      s[m][n] = exponential<general>(s[m][n], row.maximum[m], unit);
      sum += s[m][n];
    }
    row.sum[m] += sum;
  }
}

/// Adds the second group's O and row sums to those of the first group, through shared memory. Lane n of a
/// group has the same elements as lane n of the other.
template <typename C, bool general>
__device__ __forceinline__ void join_groups(float (&o)[C::M][C::V], float unit, SoftmaxRow<C>& row, int group,
                                            float* smem) {
  constexpr int lanes = C::group_warps * 32;
  float* own_smem = smem + threadIdx.x % lanes;  // [M, V + 2, lanes]
  __syncthreads();                               // all warps have read K, which the sums overwrite
  if (group == 1) {
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int d = 0; d < C::V; ++d) own_smem[(m * (C::V + 2) + d) * lanes] = o[m][d];
      own_smem[(m * (C::V + 2) + C::V) * lanes] = row.maximum[m];
      own_smem[(m * (C::V + 2) + C::V + 1) * lanes] = row.sum[m];
    }
  }
  __syncthreads();  // the second group's sums are stored
  if (group == 1) return;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const float other = own_smem[(m * (C::V + 2) + C::V) * lanes];
    const float maximum = fmaxf(row.maximum[m], other);
    const float own_factor = exponential<general>(row.maximum[m], maximum, unit);
    const float other_factor = exponential<general>(other, maximum, unit);
    row.maximum[m] = maximum;
    row.sum[m] = row.sum[m] * own_factor + own_smem[(m * (C::V + 2) + C::V + 1) * lanes] * other_factor;
#pragma unroll
    for (int d = 0; d < C::V; ++d) {
      o[m][d] = o[m][d] * own_factor + own_smem[(m * (C::V + 2) + d) * lanes] * other_factor;
    }
  }
}

}  // namespace tilewise::cuda::simt
