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

/// Queries [first, last) of which some see a block's keys.
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

/// A tile of queries that a block meets.
struct QueriesAt {
  std::int64_t hq;
  std::int64_t split;  ///< among the tiles that were split
  std::int64_t row;    ///< the first query's, among [Hq, rows_q]
  int first;           ///< query
};

/// What a block of backward keeps, and where; and how queries come to it.
template <auto c>
struct BackwardBlock {
  using PairTile = SwizzledTile<c.keys>;

  const AttentionCall& call;
  const BackwardSpace& space;
  const Sequence sequence;
  const std::int64_t b, h;  ///< of the keys
  const std::int64_t first_key;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::byte* k_smem;  ///< own_tiles x parts x [keys, dim]
  std::byte* v_smem;
  std::byte* stages_smem;  ///< 2 x (q, d_o), each parts x [queries, dim]
  std::byte* pairs_smem;   ///< parts x [own, queries]: score gradients
  float* values_smem;      ///< 2 x (3 x [queries], exponents of q and d_o, d_o's norm)
  float* sums_smem;        ///< warps x 2 x [queries]: of weights and of score gradients that are no peaks
  float* factors_smem;     ///< own_tiles: what products with a tile's keys are to be multiplied by
  ScaledSum<c> dk, dv;
  float v_norm = 0;
  int least_k_exponent = 126;
  int k_exponent = 0, v_exponent = 0;  ///< of the warp's own tile
  int whole_first, whole_last;         ///< queries that see all the block's keys

  __device__ BackwardBlock(const AttentionCall& call_, const BackwardSpace& space_, std::int64_t b_,
                           std::int64_t h_, std::int64_t first_key_, std::byte* shared)
      : call(call_),
        space(space_),
        sequence(call.sequence(b_)),
        b(b_),
        h(h_),
        first_key(first_key_),
        k_smem(shared),
        v_smem(k_smem + c.own_tiles() * c.tile_bytes()),
        stages_smem(v_smem + c.own_tiles() * c.tile_bytes()),
        pairs_smem(stages_smem + 4 * c.tile_bytes()),
        values_smem(reinterpret_cast<float*>(pairs_smem + c.parts * c.pair_part_bytes())),
        sums_smem(values_smem + 2 * c.stage_values),
        factors_smem(sums_smem + c.warps * 2 * c.keys) {
    const auto within = [](std::int64_t i) {
      return static_cast<int>(max(std::int64_t{-1}, min(i, std::int64_t{0x7fffffff})));
    };
    const std::int64_t last_key = first_key + c.own() - 1;
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
  __device__ float* values_stage(int stage) const { return values_smem + stage * c.stage_values; }

  static __device__ void copy_tile(std::byte* to_smem, const std::byte* from, bool present) {
#pragma unroll
    for (int n = 0; n < c.tile_bytes() / 16; n += c.threads()) {
      const int chunk = (n + static_cast<int>(threadIdx.x)) * 16;
      copy_async_16(to_smem + chunk, present ? from + chunk : from, present);
    }
  }

  /// Keys and values of the block, and what is known of them.
  __device__ void load_own() {
    const std::int64_t first = space.k.first(call, b, h) + first_key / c.keys;
    for (int tile = 0; tile < c.own_tiles(); ++tile) {
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
    if (threadIdx.x < c.own_tiles()) {
      const int exponent = exponent_at(space.k, static_cast<int>(threadIdx.x));
      factors_smem[threadIdx.x] = power_of_two(max(least_k_exponent - exponent, -126));
    }
  }

  __device__ void load_queries(const QueriesAt& at, int stage) const {
    copy_tile(q_stage(stage), space.q.data + at.split * c.tile_bytes(), true);
    copy_tile(d_o_stage(stage), space.d_o.data + at.split * c.tile_bytes(), true);
    float* to = values_stage(stage) + warp * c.keys + lane;
    if (warp < 3) {
      const RowValues& rows = space.rows;
      const float* from = warp == 0 ? rows.top : warp == 1 ? rows.factor : rows.shift;
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

  /// What a warp's rows of a split tile of its own are: 16 of them.
  __device__ std::uint32_t own_rows(const std::byte* smem) const {
    return address(smem + warp / 2 * c.tile_bytes() + warp % 2 * 16 * c.row_bytes());
  }

  /// Two numbers of the lane's queries, eight queries n.
  __device__ float2 two_of(const float* values, int n) const {
    return *reinterpret_cast<const float2*>(values + 8 * n + 2 * (lane % 4));
  }
};

// Pairs of a warp's keys and of a tile of queries: weights, gradients of scores, and both as operands.

/// Weights of the pairs, times 2^weight_bits, from products k·q.
template <auto c>
__device__ __forceinline__ void weigh(const BackwardBlock<c>& block, float (&s)[1][c.keys / 8][4], float unit,
                                      const float* values) {
#pragma unroll
  for (int n = 0; n < c.keys / 8; ++n) {
    const float2 top = block.two_of(values, n);
    const float2 factor = block.two_of(values + c.keys, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& one = s[0][n][e];
      one = exp2_approx(fmaf(one, unit, e % 2 == 0 ? -top.x : -top.y)) * (e % 2 == 0 ? factor.x : factor.y);
    }
  }
}

/// Makes those that are hidden 0.
template <auto c>
__device__ __forceinline__ void hide(const BackwardBlock<c>& block, float (&s)[1][c.keys / 8][4],
                                     int first_query) {
  const int key = block.warp * 16 + block.lane / 4;  // the first of two, of the block's
  using View = MmaTransposedView<float[1][c.keys / 8][4]>;
#pragma unroll
  for (int q = 0; q < View::queries; ++q) {
    const KeyRange range =
        block.call.keys_of(block.sequence, first_query + 8 * (q / 2) + 2 * (block.lane % 4) + q % 2);
    const auto first = static_cast<int>(max(range.first - block.first_key, std::int64_t{0}));
    const auto last = static_cast<int>(min(range.last - block.first_key, std::int64_t{c.own()}));
    hide_outside<View>(s, q, first, last, 0.0f, key);
  }
}

/// Gradients of scores from weights and products v·d_o: weight·(unit·product + shift), `unit` and `power`
/// having the scale of the result.
template <auto c>
__device__ __forceinline__ void differentiate(const BackwardBlock<c>& block, float (&dp)[1][c.keys / 8][4],
                                              const float (&weights)[1][c.keys / 8][4], float unit,
                                              float power, const float* values) {
#pragma unroll
  for (int n = 0; n < c.keys / 8; ++n) {
    const float2 shift = block.two_of(values + 2 * c.keys, n);
    const float scaled[2] = {shift.x * power, shift.y * power};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      dp[0][n][e] = weights[0][n][e] * fmaf(dp[0][n][e], unit, scaled[e % 2]);
    }
  }
}

template <auto c>
__device__ __forceinline__ void split_pairs(Weights<c>& to, const float (&from)[1][c.keys / 8][4]) {
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

/// Puts the warp's score gradients where all can read them.
template <auto c>
__device__ __forceinline__ void store_pairs(const BackwardBlock<c>& block, const Weights<c>& pairs) {
#pragma unroll
  for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
    for (int part = 0; part < c.parts; ++part) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = block.warp * 16 + n % 2 * 8 + block.lane / 4;
        *reinterpret_cast<std::uint32_t*>(block.pairs_smem + part * c.pair_part_bytes() +
                                          BackwardBlock<c>::PairTile::offset(row, 2 * step + n / 2) +
                                          4 * (block.lane % 4)) = pairs[step][0][part][n];
      }
    }
  }
}

// Pairs of large weight are put aside, and sums over the others are found beside them.

/// Puts the peaks among the warp's pairs aside: they take no part in dq and dk. `power` is the scale of
/// score gradients over that of weights.
template <auto c>
__device__ __forceinline__ void take_peaks(const BackwardBlock<c>& block, float (&dscores)[1][c.keys / 8][4],
                                           float (&weights)[1][c.keys / 8][4], std::int64_t first_row,
                                           float power) {
#pragma unroll
  for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float weight = weights[0][n][e] * power_of_two(-weight_bits);
      if (!(weight > simt::peak_weight)) continue;
      const std::int64_t row = first_row + 8 * n + 2 * (block.lane % 4) + e % 2;
      const int count = atomicAdd(block.space.peaks.count + row, 1);
      if (count >= simt::most_peaks) {  // lse is far off: as one of the others
        atomicAdd(block.space.peaks.rest_weight + row, weight);
        continue;
      }
      simt::Peak& peak = block.space.peaks.first[row * simt::most_peaks + count];
      peak.key = block.first_key + block.warp * 16 + e / 2 * 8 + block.lane / 4;
      peak.weight = weight;
      peak.gradient = dscores[0][n][e] / weights[0][n][e] / power;
      dscores[0][n][e] = 0;
    }
  }
}

/// Of 2 · count numbers adds up one half with those of the lane 2 · count away, which takes the other
/// half; gives the first of them.
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

/// Sums of weights and of score gradients over the warp's keys that are no peaks, a query each. Of 16
/// numbers each lane has, eight lanes share the adding: half of them are exchanged in every step.
template <auto c>
__device__ __forceinline__ void find_sums(const BackwardBlock<c>& block,
                                          const float (&dscores)[1][c.keys / 8][4],
                                          const float (&weights)[1][c.keys / 8][4], bool peaks) {
  float each[16];  // by what it is, queries n and e
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      each[2 * n + e] = weights[0][n][e] + weights[0][n][2 + e];
      each[8 + 2 * n + e] = dscores[0][n][e] + dscores[0][n][2 + e];
    }
  }
  if (peaks) {
    const auto low = [](float x) { return x * power_of_two(-weight_bits) > simt::peak_weight ? 0.0f : x; };
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) each[2 * n + e] = low(weights[0][n][e]) + low(weights[0][n][2 + e]);
    }
  }
  const int first = exchange<8>(each, block.lane) + exchange<4>(each, block.lane) +
                    exchange<2>(each, block.lane);  // of those left to the lane
  // The two that are left are of neighbouring queries.
  float* to =
      block.sums_smem + (2 * block.warp + first / 8) * c.keys + first % 8 / 2 * 8 + 2 * (block.lane % 4);
  *reinterpret_cast<float2*>(to) = {each[0], each[1]};
}

/// Adds up what all warps found, when it is there, for everyone's queries.
template <auto c>
__device__ __forceinline__ void add_sums(const BackwardBlock<c>& block, const QueriesAt& at, int exponent) {
  if (block.warp >= 2 || at.first + block.lane >= block.sequence.length_q) return;
  float sum = 0;
#pragma unroll
  for (int n = 0; n < c.warps; ++n) sum += block.sums_smem[(2 * n + block.warp) * c.keys + block.lane];
  float* to = (block.warp == 0 ? block.space.peaks.rest_weight : block.space.peaks.rest_gradient) + at.row +
              block.lane;
  const int bits = block.warp == 0 ? weight_bits : exponent;
  atomicAdd(to, sum * power_of_two(-bits / 2) * power_of_two(bits / 2 - bits));
}

// What goes to dq, dk and dv.

/// The warp's part of dq += dscores · k, which is 16 queries and some dims. Score gradients are times
/// 2^exponent. Head dims are multiples of 4.
template <auto c>
__device__ __forceinline__ void add_dq(const BackwardBlock<c>& block, const QueriesAt& at, int exponent) {
  constexpr int dim_warps = c.warps / 2;
  constexpr int count = c.dim / dim_warps / 16;
  const int half = block.warp % 2;
  const int first_step = block.warp / 2 * count;  // of 16 dims
  float sum[count][2][4] = {};
  const auto pairs = MatrixPointer<c.keys>::by_columns(block.address(block.pairs_smem));
#pragma unroll 1
  for (int tile = 0; tile < c.own_tiles(); ++tile) {
    if (block.first_key + tile * c.keys >= block.sequence.length_k) break;
    const auto k = MatrixPointer<c.dim>::by_rows(block.address(block.k_smem + tile * c.tile_bytes()));
    const float factor = block.factors_smem[tile];
    float part[count][1][2][4];
    Parts<c> a[c.keys / 16][1];
    Parts<c> from[c.keys / 16][count];
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
      for (int p = 0; p < c.parts; ++p) {
        load_matrices_turned(a[step][0][p],
                             pairs.at(tile * c.keys + 16 * step, half) + p * c.pair_part_bytes());
#pragma unroll
        for (int n = 0; n < count; ++n) {
          load_matrices_turned(from[step][n][p], k.at(16 * step, first_step + n) + p * c.part_bytes());
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
  // In two steps, since one factor might be too large or too small.
  const int scaled = exponent + block.least_k_exponent;
  const float first_factor = power_of_two(-scaled / 2) * static_cast<float>(block.call.scale);
  const float second_factor = power_of_two(scaled / 2 - scaled);
  const auto dims = static_cast<int>(block.call.problem.dim_qk);
  const bool even = block.lane % 2 == 0;
  const int first_row = at.first + 16 * half + block.lane / 4;
  auto* to = reinterpret_cast<float*>(block.call.dq.at(block.b, at.hq, block.sequence.first_q + first_row));
#pragma unroll
  for (int n = 0; n < count; ++n) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Of two neighbours each takes four consecutive dims: the first those of the first fragment.
      const float* low = sum[n][0] + 2 * row;
      const float* high = sum[n][1] + 2 * row;
      const float other_first = __shfl_xor_sync(~0u, even ? high[0] : low[0], 1);
      const float other_second = __shfl_xor_sync(~0u, even ? high[1] : low[1], 1);
      const float four[4] = {even ? low[0] : other_first, even ? low[1] : other_second,
                             even ? other_first : high[0], even ? other_second : high[1]};
      const int dim = 16 * (first_step + n) + (even ? 0 : 8) + block.lane % 4 / 2 * 4;
      if (first_row + 8 * row >= block.sequence.length_q || dim >= dims) continue;
      const auto scaled_back = [&](int e) { return four[e] * first_factor * second_factor; };
      add_4(to + 8 * row * block.call.dq.stride_s + dim,
            {scaled_back(0), scaled_back(1), scaled_back(2), scaled_back(3)});
    }
  }
}

/// Writes the warp's rows of dk or dv.
template <auto c>
__device__ __forceinline__ void store(const BackwardBlock<c>& block, const Rows& rows,
                                      const ScaledSum<c>& from, int dims, float factor) {
  if (!rows.wanted) return;
  const bool pairs = aligned_fours(rows);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t j = block.first_key + block.warp * 16 + 8 * half + block.lane / 4;
    if (j >= block.sequence.length_k) continue;
    auto* to = reinterpret_cast<float*>(rows.at(block.b, block.h, block.sequence.first_k + j));
#pragma unroll
    for (int n = 0; n < c.dim / 8; ++n) {
      const int dim = 8 * n + 2 * (block.lane % 4);
      if (dim >= dims) continue;
      const float first = from.scaled_back(from.sum[0][n][2 * half] * factor);
      const float second = from.scaled_back(from.sum[0][n][2 * half + 1] * factor);
      if (pairs && dim + 2 <= dims) {
        *reinterpret_cast<float2*>(to + dim) = {first, second};
      } else {
        to[dim] = first;
        if (dim + 1 < dims) to[dim + 1] = second;
      }
    }
  }
}

/// Adds them to what other blocks add. Head dims are multiples of 4.
template <auto c>
__device__ __forceinline__ void add(const BackwardBlock<c>& block, const Rows& rows, const ScaledSum<c>& from,
                                    int dims, float factor) {
  if (!rows.wanted) return;
  // Two neighbours have two dims each of the same two rows: each takes all four of one.
  const bool even = block.lane % 2 == 0;
  const std::int64_t j = block.first_key + block.warp * 16 + (even ? 0 : 8) + block.lane / 4;
  const bool present = j < block.sequence.length_k;
  auto* to = reinterpret_cast<float*>(
      rows.at(block.b, block.h, block.sequence.first_k + (present ? j : block.first_key)));
#pragma unroll
  for (int n = 0; n < c.dim / 8; ++n) {
    const float(&own)[4] = from.sum[0][n];
    const float first = __shfl_xor_sync(~0u, even ? own[2] : own[0], 1);
    const float second = __shfl_xor_sync(~0u, even ? own[3] : own[1], 1);
    const int dim = 8 * n + block.lane % 4 / 2 * 4;
    if (!present || dim >= dims) continue;
    const auto scaled_back = [&](float x) { return from.scaled_back(x * factor); };
    add_4_of_any_size(to + dim, {scaled_back(even ? own[0] : first), scaled_back(even ? own[1] : second),
                                 scaled_back(even ? first : own[2]), scaled_back(even ? second : own[3])});
  }
}

template <auto c>
__device__ __forceinline__ void finish(const BackwardBlock<c>& block, const Rows& rows,
                                       const ScaledSum<c>& sum, std::int64_t dims, float factor, bool alone) {
  alone ? store(block, rows, sum, static_cast<int>(dims), factor)
        : add(block, rows, sum, static_cast<int>(dims), factor);
}

}  // namespace tilewise::cuda::mma_f32
