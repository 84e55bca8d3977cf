#pragma once

#include <cmath>

#include "attention/call.h"
#include "core/arena.h"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda::mma {

// What the kernels of a backward call share, in its workspace.

/// Of every query, [Hq, rows_q] each. A weight above peak_weight is a peak: of a row one at most, since
/// weights are exact to far more than the rest. Its score's gradient, weight·(d_o·v − d_o·o + d_lse), would
/// be a difference of nearly equal numbers of which one has the rounding of o. So the pair is left out, and
/// mended at the end: with x = d_o·v + shift, known up to a constant that all keys of a row share,
///
///   gradient of f = weight_f · (Σ_j weight_j·(x_f − x_j) + d_lse)
///
/// where the sum over the others is made on the way, and the constant drops out.
struct RowValues {
  float* top = nullptr;    ///< lse·log2 e; infinite for a query that saw nothing
  float* shift = nullptr;  ///< d_lse − d_o·o
  float* rest = nullptr;   ///< Σ weight·x over the other keys, as score gradients are: rounded, and scaled
  std::int64_t* peak_key = nullptr;  ///< its row in k, or −1
  float* peak_weight = nullptr;
  float* peak_x = nullptr;
};
inline constexpr float least_peak = 0.6f;

/// f16 cannot hold what is below 6e-5 as well as what is above, and weights and score gradients often are. So
/// they are scaled there by powers of two: weights by a constant, score gradients by what the largest of d_o,
/// v and d_lse allow. bf16 has the range of f32.
struct Largest {
  int d_o = 0;  ///< norm of a row, as the bits of a float, which compare as it does
  int v = 0;
  int d_lse = 0;
};
template <typename T>
inline constexpr int weight_bits = 0;
template <>
inline constexpr int weight_bits<__half> = 14;

/// The power of two by which score gradients are multiplied.
struct GradientScale {
  float up = 1;
  float down = 1;
};
template <typename T>
__device__ __forceinline__ GradientScale gradient_scale(const Largest* largest) {
  if constexpr (weight_bits<T> == 0) {
    return {};
  } else {
    // |d_o·v − d_o·o| is at most twice the product of the norms.
    const float bound =
        fmaf(2 * __int_as_float(largest->d_o), __int_as_float(largest->v), __int_as_float(largest->d_lse));
    if (!(bound > 0) || isinf(bound)) return {};
    const int bits = max(-100, min(100, 14 - ilogbf(bound)));  // below 2^15, half of what f16 holds
    return {exp2f(static_cast<float>(bits)), exp2f(static_cast<float>(-bits))};
  }
}

/// Where element `dim` of a row of dq's sums is. In every sixteen, what a lane has of two neighbouring
/// fragments of a product lies together: 2t, 2t + 1, 2t + 8, 2t + 9.
__host__ __device__ constexpr int dq_place(int dim) {
  return dim / 16 * 16 + dim % 8 / 2 * 4 + dim % 16 / 8 * 2 + dim % 2;
}

struct BackwardSpace {
  RowValues rows;
  Largest* largest = nullptr;
  float* dq = nullptr;  ///< [Hq, rows_q, dq_stride]: its sums, before the score's scale
  int dq_stride = 0;    ///< a multiple of 16
  float* dk = nullptr;  ///< [Hkv, rows_k, dim_qk]: of keys with a peak alone, before the scale
  std::uint8_t* key_has_peak = nullptr;  ///< [Hkv, rows_k]
  std::size_t bytes = 0;

  BackwardSpace(const AttentionCall& call, void* data) {
    Arena arena(data);
    const std::int64_t queries = call.problem.heads_q * call.rows_q();
    const std::int64_t keys = call.problem.heads_kv * call.rows_k();
    for (float** each : {&rows.top, &rows.shift, &rows.rest, &rows.peak_weight, &rows.peak_x}) {
      *each = arena.take<float>(queries);
    }
    rows.peak_key = arena.take<std::int64_t>(queries);
    largest = arena.take<Largest>(1);
    dq_stride = static_cast<int>((call.problem.dim_qk + 15) / 16 * 16);
    if (call.dq.wanted) dq = arena.take<float>(queries * dq_stride);
    if (call.dk.wanted) {
      dk = arena.take<float>(keys * call.problem.dim_qk);
      key_has_peak = arena.take<std::uint8_t>(keys);
    }
    bytes = arena.used();
  }
  /// Where what is kept of key `s` of k's rows is, in [Hkv, rows_k].
  __device__ static std::int64_t key_row(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                         std::int64_t s) {
    return h * call.rows_k() + (call.packed() ? s : b * call.problem.length_k + s);
  }
};

/// The gradient of a peak's score, times the score gradients' scale.
template <typename T>
__device__ __forceinline__ float peak_gradient(const RowValues& rows, std::int64_t row, float d_lse,
                                               const GradientScale& scale) {
  const float weight = rows.peak_weight[row];
  const float others = fmaxf(0.0f, 1 - weight);
  return weight * (fmaf(others * scale.up, rows.peak_x[row], -rows.rest[row]) + scale.up * d_lse);
}

}  // namespace tilewise::cuda::mma
