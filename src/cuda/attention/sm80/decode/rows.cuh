#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/common/score.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// What a warp computes from its K and V tiles: S, the softmax and O of eight rows. A warp has its own maximum
// and sum, so that it never waits for another one.
//
// P is kept exact by a second product with its rounding errors, and products of 16 dims are summed in f32:
// tensor cores have little else to do.

/// What a lane has of Q, O and the softmax's sums; g = lane / 4, t = lane % 4.
template <typename T, int dim>
struct DecodeRows {
  static constexpr int steps = dim / 16;
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  std::uint32_t q[steps][2];  ///< row g as operand A, whose rows from 8 on are 0
  /// Rows 2t and 2t + 1 of dim 16n + g, then the same rows of dim 16n + 8 + g.
  float o[steps][4] = {};
  float maximum = lowest;  ///< of row g: what its P is relative to
  float sum = 0;           ///< of the lane's own P of row g

  __device__ __forceinline__ void load_queries(const std::byte* row) {
#pragma unroll
    for (int n = 0; n < steps; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        q[n][half] = *reinterpret_cast<const std::uint32_t*>(row + n * 32 + half * 16 + t * 4);
      }
    }
  }

  /// Products of row g with keys 2t, 2t + 1, 2t + 8 and 2t + 9.
  __device__ __forceinline__ void multiply_keys(float (&s)[4], const MatrixPointer<dim>& k_smem) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = 0;
#pragma unroll
    for (int n = 0; n < steps; ++n) {
      const std::uint32_t rows[4] = {q[n][0], 0, q[n][1], 0};
      std::uint32_t keys[4];
      load_matrices(keys, k_smem.at(0, n));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float products[4] = {};
        multiply_matrices<T>(products, rows, keys[2 * half], keys[2 * half + 1]);
        s[2 * half] += products[0];
        s[2 * half + 1] += products[1];
      }
    }
  }

  /// Turns scores, in natural units, into P. The maximum is raised only when it is 2^8 too low.
  __device__ __forceinline__ void exponentiate(float (&s)[4]) {
    constexpr float slack = 8 / log2e;
    const float own = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
    if (__any_sync(~0u, own > maximum + slack)) {
      const float raised = fmaxf(maximum, row_maximum(own));
      const float rescale = exp2_approx((maximum - raised) * log2e);
      maximum = raised;
      sum *= rescale;
      const float of_two[2] = {of_row(rescale, 0), of_row(rescale, 1)};
#pragma unroll
      for (int n = 0; n < steps; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] *= of_two[e % 2];
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[e] = exp2_approx((s[e] - maximum) * log2e);
      sum += s[e];
    }
  }

  __device__ __forceinline__ void add_values(const float (&p)[4], const MatrixPointer<dim>& v_smem) {
    std::uint32_t rounded[2], errors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rounded[half] = pack<T>(p[2 * half], p[2 * half + 1]);
      const float2 kept = unpack<T>(rounded[half]);
      errors[half] = pack<T>(p[2 * half] - kept.x, p[2 * half + 1] - kept.y);
    }
#pragma unroll
    for (int n = 0; n < steps; ++n) {
      std::uint32_t dims[4];  // operand A is Vᵀ
      load_matrices_transposed(dims, v_smem.at(0, n));
      multiply_matrices<T>(o[n], dims, errors[0], errors[1]);
      multiply_matrices<T>(o[n], dims, rounded[0], rounded[1]);
    }
  }

  /// The value of x in a lane of row 2t, or of the row after it.
  __device__ __forceinline__ float of_row(float x, int after) const {
    return __shfl_sync(~0u, x, 8 * t + 4 * after);
  }
};

}  // namespace tilewise::cuda::mma
