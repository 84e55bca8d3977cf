#pragma once

#include <cmath>

#include "attention/call.h"
#include "core/arena.h"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda::mma {

// What the kernels of a backward call share, in its workspace.

/// A pair whose score's gradient is left out of the products.
struct Peak {
  std::int64_t key;  ///< its row in k
  float weight;
  float x;  ///< d_o·v + shift
};

/// Of every query, [Hq, rows_q] each. A weight above least_peak is a peak. Its score's gradient,
/// weight·(d_o·v − d_o·o + d_lse), may be a difference of nearly equal numbers of which one has the rounding
/// of o, and is often the largest of its row. So the pair is left out, and mended at the end in f32: with x
/// known up to a constant that all keys of a row share,
///
///   gradient of f = weight_f · (Σ_j weight_j·(x_f − x_j) + d_lse)
///
/// where the sum over the others is made on the way, and the constant drops out.
struct RowValues {
  float* top = nullptr;    ///< lse·log2 e; infinite for a query that saw nothing
  float* shift = nullptr;  ///< d_lse − d_o·o
  float* rest = nullptr;   ///< Σ weight·x over keys that are no peaks, times the score gradients' scale
  int* peak_count = nullptr;
  Peak* peaks = nullptr;  ///< [Hq, rows_q, most_peaks]
};
inline constexpr float least_peak = 0.26f;
inline constexpr int most_peaks = 3;

/// Rounding to 16 bits takes the more from a sum the fewer terms matter in it. Where a tile has a weight
/// above this, what rounding took goes into a second round of products.
inline constexpr float least_whole = 0.25f;

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

/// Where dq is summed up. Its elements lie as fragments of a product have them, 16 queries by 8 dims, so that
/// a lane adds the four it has at once: [Hq, tiles of 16 queries, eights of dims, 32 lanes, 4]. Every
/// sequence begins with a tile of its own.
struct QuerySums {
  static constexpr int fragment = 128;
  float* data = nullptr;
  std::int64_t tiles = 0;  ///< a head
  int eights = 0;

  static std::int64_t tiles_of(const AttentionCall& call) {
    return call.packed() ? call.total_q / 16 + call.problem.batch + 1
                         : call.problem.batch * ((call.problem.length_q + 15) / 16);
  }
  __device__ static std::int64_t first_tile(const AttentionCall& call, std::int64_t b) {
    return call.packed() ? call.cumulative_q.at(b) / 16 + b : b * ((call.problem.length_q + 15) / 16);
  }
  __device__ float* at(std::int64_t head, std::int64_t tile, int eight) const {
    return data + ((head * tiles + tile) * eights + eight) * fragment;
  }
};

struct BackwardSpace {
  RowValues rows;
  Largest* largest = nullptr;
  QuerySums dq;         ///< before the score's scale
  float* dk = nullptr;  ///< [Hkv, rows_k, dim_qk]: of keys with a peak alone, before the scale
  std::uint8_t* key_has_peak = nullptr;  ///< [Hkv, rows_k]
  std::size_t bytes = 0;

  BackwardSpace(const AttentionCall& call, void* data) {
    Arena arena(data);
    const std::int64_t queries = call.problem.heads_q * call.rows_q();
    const std::int64_t keys = call.problem.heads_kv * call.rows_k();
    rows = {.top = arena.take<float>(queries),
            .shift = arena.take<float>(queries),
            .rest = arena.take<float>(queries),
            .peak_count = arena.take<int>(queries),
            .peaks = arena.take<Peak>(queries * most_peaks)};
    largest = arena.take<Largest>(1);
    if (call.dq.wanted) {
      dq.tiles = QuerySums::tiles_of(call);
      dq.eights = static_cast<int>((call.problem.dim_qk + 7) / 8);
      dq.data = arena.take<float>(call.problem.heads_q * dq.tiles * dq.eights * QuerySums::fragment);
    }
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

/// The peaks of a query, and the gradients of their scores, times the score gradients' scale.
struct Mended {
  int count = 0;
  std::int64_t key[most_peaks] = {};
  float gradient[most_peaks] = {};

  Mended() = default;
  __device__ Mended(const RowValues& rows, std::int64_t row, float d_lse, const GradientScale& scale)
      : count(min(rows.peak_count[row], most_peaks)) {
    if (count == 0) return;
    float others = 1;  // their weight
    float weight[most_peaks] = {}, x[most_peaks] = {};
#pragma unroll
    for (int f = 0; f < most_peaks; ++f) {
      if (f >= count) continue;
      const Peak peak = rows.peaks[row * most_peaks + f];
      key[f] = peak.key;
      weight[f] = peak.weight;
      x[f] = peak.x;
      others -= peak.weight;
    }
    others = fmaxf(0.0f, others);
#pragma unroll
    for (int f = 0; f < most_peaks; ++f) {
      float sum = fmaf(others, x[f], d_lse);
#pragma unroll
      for (int g = 0; g < most_peaks; ++g) sum = fmaf(weight[g], x[f] - x[g], sum);
      gradient[f] = weight[f] * fmaf(scale.up, sum, -rows.rest[row]);
    }
  }
};

}  // namespace tilewise::cuda::mma
