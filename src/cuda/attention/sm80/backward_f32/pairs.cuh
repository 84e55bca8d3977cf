#pragma once

#include "cuda/attention/common/f32/products.cuh"
#include "cuda/attention/common/f32/split_rows.cuh"
#include "cuda/attention/common/key_tiles.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm80/backward_f32/space.h"
#include "cuda/attention/sm80/backward_f32/tuning.h"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/reduce.cuh"

namespace tilewise::cuda::mma_f32 {

/// Queries [first, last), among which are all that see some of a CTA's keys.
struct QueryRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
__device__ __forceinline__ QueryRange queries_of(const AttentionCall& call, const Sequence& s,
                                                 std::int64_t first_key, std::int64_t last_key) {
  const std::int64_t first = max(std::int64_t{0}, first_key - call.band.right - s.band_offset);
  const std::int64_t last = min(s.length_q, last_key + call.band.left - s.band_offset);
  return {first, max(first, last)};
}

/// A Q tile that a CTA meets.
struct QueriesAt {
  std::int64_t hq;
  std::int64_t split;  ///< among the tiles that were split
  std::int64_t row;    ///< of the first query, in [Hq, rows_q]
  int first;           ///< query in the sequence
};

/// The state of a CTA of the backward kernel: its K and V tiles, the stages of Q and dO, and the accumulators
/// of dK and dV.
template <auto c>
struct BackwardCta {
  using ScoreTile = SwizzledTile<c.keys>;

  const AttentionCall& call;
  const BackwardSpace& space;
  const Sequence sequence;
  const std::int64_t b, h;  ///< h is the key head
  const std::int64_t first_key;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::byte* k_smem;  ///< key_tiles x parts x [keys, dim]
  std::byte* v_smem;
  std::byte* stages_smem;  ///< 2 x (Q, dO), each parts x [queries, dim]
  std::byte* ds_smem;      ///< parts x [CTA's keys, queries]
  float* row_values_smem;  ///< 2 x (3 x [queries], exponents of Q and dO, norm of dO)
  float* sums_smem;        ///< warps x 2 x [queries]: sums of P and of dS without peaks
  float* factors_smem;     ///< key_tiles: what products with a K tile are multiplied by
  ScaledSum<c> dk, dv;
  float v_norm = 0;
  int least_k_exponent = 126;
  int k_exponent = 0, v_exponent = 0;  ///< of the warp's tile
  int whole_first, whole_last;         ///< queries that see all keys of the CTA

  __device__ BackwardCta(const AttentionCall& call_, const BackwardSpace& space_, std::int64_t b_,
                         std::int64_t h_, std::int64_t first_key_, std::byte* shared)
      : call(call_),
        space(space_),
        sequence(call.sequence(b_)),
        b(b_),
        h(h_),
        first_key(first_key_),
        k_smem(shared),
        v_smem(k_smem + c.key_tiles() * c.tile_bytes()),
        stages_smem(v_smem + c.key_tiles() * c.tile_bytes()),
        ds_smem(stages_smem + 4 * c.tile_bytes()),
        row_values_smem(reinterpret_cast<float*>(ds_smem + c.parts * c.ds_part_bytes())),
        sums_smem(row_values_smem + 2 * c.stage_row_values),
        factors_smem(sums_smem + c.warps * 2 * c.keys) {
    const auto within = [](std::int64_t i) {
      return static_cast<int>(max(std::int64_t{-1}, min(i, std::int64_t{0x7fffffff})));
    };
    const std::int64_t last_key = first_key + c.cta_keys() - 1;
    whole_first = last_key < sequence.length_k
                      ? within(max(last_key - call.band.right - sequence.band_offset, std::int64_t{0}))
                      : 0x7fffffff;
    whole_last = within(first_key + call.band.left - sequence.band_offset);
  }

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ std::byte* q_stage(int stage) const { return stages_smem + 2 * stage * c.tile_bytes(); }
  __device__ std::byte* d_o_stage(int stage) const { return q_stage(stage) + c.tile_bytes(); }
  __device__ float* row_values_stage(int stage) const { return row_values_smem + stage * c.stage_row_values; }

  static __device__ void copy_tile(std::byte* to_smem, const std::byte* from, bool present) {
#pragma unroll
    for (int n = 0; n < c.tile_bytes() / 16; n += c.threads()) {
      const int chunk = (n + static_cast<int>(threadIdx.x)) * 16;
      copy_async_16(to_smem + chunk, present ? from + chunk : from, present);
    }
  }

  /// Loads K and V of the CTA, with their exponents and norms.
  __device__ void load_keys() {
    const std::int64_t first = space.k.first(call, b, h) + first_key / c.keys;
    for (int tile = 0; tile < c.key_tiles(); ++tile) {
      const bool present = first_key + tile * c.keys < sequence.length_k;
      const std::int64_t at = first + (present ? tile : 0);
      copy_tile(k_smem + tile * c.tile_bytes(), space.k.data + at * c.tile_bytes(), present);
      copy_tile(v_smem + tile * c.tile_bytes(), space.v.data + at * c.tile_bytes(), present);
      v_norm = fmaxf(v_norm, space.v.norms[at]);
      least_k_exponent = min(least_k_exponent, space.k.exponents[at]);
    }
    const auto exponent_at = [&](const SplitRows& rows, int tile) {
      const std::int64_t last = (sequence.length_k - 1) / c.keys - first_key / c.keys;
      return rows.exponents[first + min(std::int64_t{tile}, last)];
    };
    k_exponent = exponent_at(space.k, warp / 2);
    v_exponent = exponent_at(space.v, warp / 2);
    if (threadIdx.x < c.key_tiles()) {
      const int exponent = exponent_at(space.k, static_cast<int>(threadIdx.x));
      factors_smem[threadIdx.x] = power_of_two(max(least_k_exponent - exponent, -126));
    }
  }

  __device__ void load_queries(const QueriesAt& at, int stage) const {
    copy_tile(q_stage(stage), space.q.data + at.split * c.tile_bytes(), true);
    copy_tile(d_o_stage(stage), space.d_o.data + at.split * c.tile_bytes(), true);
    float* to = row_values_stage(stage) + warp * c.keys + lane;
    if (warp < 3) {
      const RowValues& rows = space.rows;
      const float* from = warp == 0 ? rows.lse : warp == 1 ? rows.factor : rows.minus_delta;
      if (at.first + lane < sequence.length_q) {
        copy_async_4(to, from + at.row + lane);
      } else {
        *to = warp == 0 ? __int_as_float(0x7f800000) : 0.0f;
      }
    } else if (warp == 3 && lane < 3) {
      const void* from = lane == 0   ? static_cast<const void*>(space.q.exponents + at.split)
                         : lane == 1 ? static_cast<const void*>(space.d_o.exponents + at.split)
                                     : space.d_o.norms + at.split;
      copy_async_4(to, static_cast<const float*>(from));
    }
  }

  /// The warp's 16 rows of a split K or V tile.
  __device__ std::uint32_t warp_rows(const std::byte* smem) const {
    return address(smem + warp / 2 * c.tile_bytes() + warp % 2 * 16 * c.row_bytes());
  }

  /// Two numbers of the lane's queries 8n + 2t and 8n + 2t + 1.
  __device__ float2 two_of(const float* row_values, int n) const {
    return *reinterpret_cast<const float2*>(row_values + 8 * n + 2 * (lane % 4));
  }
};

// P and dS of a warp's keys by a Q tile, in f32 and as operands of the next products.

/// Turns products k·q into P times 2^p_scale_bits, in place.
template <auto c>
__device__ __forceinline__ void exponentiate(const BackwardCta<c>& cta, float (&s)[1][c.keys / 8][4],
                                             float scale_log2, const float* row_values) {
#pragma unroll
  for (int n = 0; n < c.keys / 8; ++n) {
    const float2 lse = cta.two_of(row_values, n);
    const float2 factor = cta.two_of(row_values + c.keys, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& one = s[0][n][e];
      one = exp2_approx(fmaf(one, scale_log2, e % 2 == 0 ? -lse.x : -lse.y)) *
            (e % 2 == 0 ? factor.x : factor.y);
    }
  }
}

/// Makes P of hidden elements 0.
template <auto c>
__device__ __forceinline__ void hide(const BackwardCta<c>& cta, float (&s)[1][c.keys / 8][4],
                                     int first_query) {
  const int key = cta.warp * 16 + cta.lane / 4;  // the first of two, among the CTA's keys
  using View = MmaTransposedView<float[1][c.keys / 8][4]>;
#pragma unroll
  for (int q = 0; q < View::queries; ++q) {
    const KeyRange range =
        cta.call.keys_of(cta.sequence, first_query + 8 * (q / 2) + 2 * (cta.lane % 4) + q % 2);
    const auto first = static_cast<int>(max(range.first - cta.first_key, std::int64_t{0}));
    const auto last = static_cast<int>(min(range.last - cta.first_key, std::int64_t{c.cta_keys()}));
    hide_outside<View>(s, q, first, last, 0.0f, key);
  }
}

/// dS = P·(dP − delta + dLSE) from dP = V·dO, in place. `dp_scale` brings dP, and `scale` brings dLSE −
/// delta, to the scale of dS over that of P.
template <auto c>
__device__ __forceinline__ void compute_ds(const BackwardCta<c>& cta, float (&dp)[1][c.keys / 8][4],
                                           const float (&p)[1][c.keys / 8][4], float dp_scale, float scale,
                                           const float* row_values) {
#pragma unroll
  for (int n = 0; n < c.keys / 8; ++n) {
    const float2 minus_delta = cta.two_of(row_values + 2 * c.keys, n);
    const float scaled[2] = {minus_delta.x * scale, minus_delta.y * scale};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      dp[0][n][e] = p[0][n][e] * fmaf(dp[0][n][e], dp_scale, scaled[e % 2]);
    }
  }
}

template <auto c>
__device__ __forceinline__ void split_scores(ScoreFragments<c>& to, const float (&from)[1][c.keys / 8][4]) {
#pragma unroll
  for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // eight queries n / 2 of the step, half n % 2 of the keys
      const float(&four)[4] = from[0][2 * step + n / 2];
      const Pair two = split_two(four[2 * (n % 2)], four[2 * (n % 2) + 1]);
      to[step][0][0][n] = two.high;
      to[step][0][1][n] = two.low;
    }
  }
}

/// Stores the warp's dS in shared memory, where dQ needs that of all warps.
template <auto c>
__device__ __forceinline__ void store_ds(const BackwardCta<c>& cta, const ScoreFragments<c>& ds) {
#pragma unroll
  for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
    for (int part = 0; part < c.parts; ++part) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = cta.warp * 16 + n % 2 * 8 + cta.lane / 4;
        *reinterpret_cast<std::uint32_t*>(cta.ds_smem + part * c.ds_part_bytes() +
                                          BackwardCta<c>::ScoreTile::offset(row, 2 * step + n / 2) +
                                          4 * (cta.lane % 4)) = ds[step][0][part][n];
      }
    }
  }
}

// Peaks are left out and stored, and the sums over the other keys are computed.

/// Takes the peaks out of the warp's dS, so that they add nothing to dQ and dK, and stores them. `power` is
/// the scale of dS over that of P.
template <auto c>
__device__ __forceinline__ void take_peaks(const BackwardCta<c>& cta, float (&ds)[1][c.keys / 8][4],
                                           float (&p)[1][c.keys / 8][4], std::int64_t first_row,
                                           float power) {
#pragma unroll
  for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float weight = p[0][n][e] * power_of_two(-p_scale_bits);
      if (!(weight > simt::peak_weight)) continue;
      const std::int64_t row = first_row + 8 * n + 2 * (cta.lane % 4) + e % 2;
      const int count = atomicAdd(cta.space.peaks.count + row, 1);
      if (count >= simt::most_peaks) {  // LSE is far off; count it among the other keys
        atomicAdd(cta.space.peaks.rest_weight + row, weight);
        continue;
      }
      simt::Peak& peak = cta.space.peaks.first[row * simt::most_peaks + count];
      peak.key = cta.first_key + cta.warp * 16 + e / 2 * 8 + cta.lane / 4;
      peak.weight = weight;
      peak.gradient = ds[0][n][e] / p[0][n][e] / power;
      ds[0][n][e] = 0;
    }
  }
}

/// One step of a reduction across lanes: adds half of a lane's 2 · count numbers to those of the lane 2 ·
/// count away and leaves the other half to that lane. Returns the index of the first number kept.
template <int count>
__device__ __forceinline__ int exchange(float (&each)[16], int lane) {
  const bool upper = (lane & 2 * count) != 0;
#pragma unroll
  for (int n = 0; n < count; ++n) {
    const float other = __shfl_xor_sync(~0u, upper ? each[n] : each[n + count], 2 * count);
    each[n] = (upper ? each[n + count] : each[n]) + other;
  }
  return upper ? count : 0;
}

/// Sums of P and of dS per query over the warp's keys, without peaks. Each lane has 16 numbers, and eight
/// lanes share the reduction: each step halves the numbers of a lane.
template <auto c>
__device__ __forceinline__ void sum_rows(const BackwardCta<c>& cta, const float (&ds)[1][c.keys / 8][4],
                                         const float (&p)[1][c.keys / 8][4], bool peaks) {
  float each[16];  // P, then dS, of queries 8n + 2t + e
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      each[2 * n + e] = p[0][n][e] + p[0][n][2 + e];
      each[8 + 2 * n + e] = ds[0][n][e] + ds[0][n][2 + e];
    }
  }
  if (peaks) {
    const auto low = [](float x) { return x * power_of_two(-p_scale_bits) > simt::peak_weight ? 0.0f : x; };
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) each[2 * n + e] = low(p[0][n][e]) + low(p[0][n][2 + e]);
    }
  }
  const int first = exchange<8>(each, cta.lane) + exchange<4>(each, cta.lane) +
                    exchange<2>(each, cta.lane);  // the first of the lane's two
  // The two numbers that are left belong to neighbouring queries.
  float* to = cta.sums_smem + (2 * cta.warp + first / 8) * c.keys + first % 8 / 2 * 8 + 2 * (cta.lane % 4);
  *reinterpret_cast<float2*>(to) = {each[0], each[1]};
}

/// Adds the sums of all warps to those of the rows. The caller passed a barrier after sum_rows().
template <auto c>
__device__ __forceinline__ void add_row_sums(const BackwardCta<c>& cta, const QueriesAt& at, int exponent) {
  if (cta.warp >= 2 || at.first + cta.lane >= cta.sequence.length_q) return;
  float sum = 0;
#pragma unroll
  for (int n = 0; n < c.warps; ++n) sum += cta.sums_smem[(2 * n + cta.warp) * c.keys + cta.lane];
  float* to =
      (cta.warp == 0 ? cta.space.peaks.rest_weight : cta.space.peaks.rest_gradient) + at.row + cta.lane;
  const int bits = cta.warp == 0 ? p_scale_bits : exponent;
  atomicAdd(to, sum * power_of_two(-bits / 2) * power_of_two(bits / 2 - bits));
}

// dQ, dK and dV.

/// dQ += dS·K. A warp computes 16 queries by some of the dims. dS has the factor 2^exponent. Head dims are
/// multiples of 4.
template <auto c>
__device__ __forceinline__ void add_dq(const BackwardCta<c>& cta, const QueriesAt& at, int exponent) {
  constexpr int dim_warps = c.warps / 2;
  constexpr int count = c.dim / dim_warps / 16;
  const int half = cta.warp % 2;
  const int first_step = cta.warp / 2 * count;  // of 16 dims
  float sum[count][2][4] = {};
  const auto ds = MatrixPointer<c.keys>::by_columns(cta.address(cta.ds_smem));
#pragma unroll 1
  for (int tile = 0; tile < c.key_tiles(); ++tile) {
    if (cta.first_key + tile * c.keys >= cta.sequence.length_k) break;
    const auto k = MatrixPointer<c.dim>::by_rows(cta.address(cta.k_smem + tile * c.tile_bytes()));
    const float factor = cta.factors_smem[tile];
    float part[count][1][2][4];
    Parts<c> a[c.keys / 16][1];
    Parts<c> from[c.keys / 16][count];
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
      for (int p = 0; p < c.parts; ++p) {
        load_matrices_transposed(a[step][0][p],
                                 ds.at(tile * c.keys + 16 * step, half) + p * c.ds_part_bytes());
#pragma unroll
        for (int n = 0; n < count; ++n) {
          load_matrices_transposed(from[step][n][p], k.at(16 * step, first_step + n) + p * c.part_bytes());
        }
      }
    }
    add_products(part, a, from, true);
#pragma unroll
    for (int n = 0; n < count * 8; ++n) {
      float& to = sum[n / 8][n / 4 % 2][n % 4];
      to = fmaf(part[n / 8][0][n / 4 % 2][n % 4], factor, to);
    }
  }
  // The factor is applied in two steps, since alone it might overflow or underflow.
  const int scaled = exponent + cta.least_k_exponent;
  const float first_factor = power_of_two(-scaled / 2) * static_cast<float>(cta.call.scale);
  const float second_factor = power_of_two(scaled / 2 - scaled);
  const auto dims = static_cast<int>(cta.call.problem.dim_qk);
  const bool even = cta.lane % 2 == 0;
  const int first_row = at.first + 16 * half + cta.lane / 4;
  auto* to = reinterpret_cast<float*>(cta.call.dq.at(cta.b, at.hq, cta.sequence.first_q + first_row));
#pragma unroll
  for (int n = 0; n < count; ++n) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Two neighbouring lanes exchange elements, so that each adds four consecutive dims: the even lane
      // those of the first fragment.
      const float* low = sum[n][0] + 2 * row;
      const float* high = sum[n][1] + 2 * row;
      const float other_first = __shfl_xor_sync(~0u, even ? high[0] : low[0], 1);
      const float other_second = __shfl_xor_sync(~0u, even ? high[1] : low[1], 1);
      const float four[4] = {even ? low[0] : other_first, even ? low[1] : other_second,
                             even ? other_first : high[0], even ? other_second : high[1]};
      const int dim = 16 * (first_step + n) + (even ? 0 : 8) + cta.lane % 4 / 2 * 4;
      if (first_row + 8 * row >= cta.sequence.length_q || dim >= dims) continue;
      const auto scaled_back = [&](int e) { return four[e] * first_factor * second_factor; };
      add_4(to + 8 * row * cta.call.dq.stride_s + dim,
            {scaled_back(0), scaled_back(1), scaled_back(2), scaled_back(3)});
    }
  }
}

/// Writes the warp's rows of dK or dV, where no other CTA shares its keys.
template <auto c>
__device__ __forceinline__ void store(const BackwardCta<c>& cta, const Rows& rows, const ScaledSum<c>& from,
                                      int dims, float factor) {
  if (!rows.wanted) return;
  const bool aligned = aligned_fours(rows);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t j = cta.first_key + cta.warp * 16 + 8 * half + cta.lane / 4;
    if (j >= cta.sequence.length_k) continue;
    auto* to = reinterpret_cast<float*>(rows.at(cta.b, cta.h, cta.sequence.first_k + j));
#pragma unroll
    for (int n = 0; n < c.dim / 8; ++n) {
      const int dim = 8 * n + 2 * (cta.lane % 4);
      if (dim >= dims) continue;
      const float first = from.scaled_back(from.sum[0][n][2 * half] * factor);
      const float second = from.scaled_back(from.sum[0][n][2 * half + 1] * factor);
      if (aligned && dim + 2 <= dims) {
        *reinterpret_cast<float2*>(to + dim) = {first, second};
      } else {
        to[dim] = first;
        if (dim + 1 < dims) to[dim + 1] = second;
      }
    }
  }
}

/// Adds the warp's rows of dK or dV to what other CTAs add. Head dims are multiples of 4.
template <auto c>
__device__ __forceinline__ void add(const BackwardCta<c>& cta, const Rows& rows, const ScaledSum<c>& from,
                                    int dims, float factor) {
  if (!rows.wanted) return;
  // Two neighbouring lanes have two dims each of the same two rows. They exchange elements, so that each adds
  // four dims of one row.
  const bool even = cta.lane % 2 == 0;
  const std::int64_t j = cta.first_key + cta.warp * 16 + (even ? 0 : 8) + cta.lane / 4;
  const bool present = j < cta.sequence.length_k;
  auto* to =
      reinterpret_cast<float*>(rows.at(cta.b, cta.h, cta.sequence.first_k + (present ? j : cta.first_key)));
#pragma unroll
  for (int n = 0; n < c.dim / 8; ++n) {
    const float(&own)[4] = from.sum[0][n];
    const float first = __shfl_xor_sync(~0u, even ? own[2] : own[0], 1);
    const float second = __shfl_xor_sync(~0u, even ? own[3] : own[1], 1);
    const int dim = 8 * n + cta.lane % 4 / 2 * 4;
    if (!present || dim >= dims) continue;
    const auto scaled_back = [&](float x) { return from.scaled_back(x * factor); };
    add_4_of_any_size(to + dim, {scaled_back(even ? own[0] : first), scaled_back(even ? own[1] : second),
                                 scaled_back(even ? first : own[2]), scaled_back(even ? second : own[3])});
  }
}

template <auto c>
__device__ __forceinline__ void finish(const BackwardCta<c>& cta, const Rows& rows, const ScaledSum<c>& sum,
                                       std::int64_t dims, float factor, bool alone) {
  alone ? store(cta, rows, sum, static_cast<int>(dims), factor)
        : add(cta, rows, sum, static_cast<int>(dims), factor);
}

}  // namespace tilewise::cuda::mma_f32
