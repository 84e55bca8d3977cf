#pragma once

#include "cuda/attention/sm80/backward/cta.cuh"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda::mma {

// From a product q·k to P: the plain kernel applies the band alone, the general one every score rule. All
// lanes branch alike around the features that a call does not have. The code of each feature is unrolled over
// the elements of S in registers.

/// The view of Sᵀ, and the positions of its elements in the tile: element (q, k) is query 8n + 2t + e and key
/// 16m + 8h + g.
template <typename Cta>
using ScoreView = MmaTransposedView<typename Cta::ScoreAccumulator>;
template <typename Cta>
__device__ __forceinline__ int query_of(const Cta& cta, int first_query, int q) {
  return first_query + 8 * (q / 2) + 2 * (cta.lane % 4) + q % 2;
}
template <typename Cta>
__device__ __forceinline__ int key_of(const Cta& cta, int first_key, int k) {
  return first_key + ScoreView<Cta>::step(k) + cta.lane / 4;
}

/// Hides what lies outside the band, and keys past the end of the tile.
template <typename Cta>
__device__ __forceinline__ void hide(const Cta& cta, const typename Cta::Queries& queries, int first_query,
                                     int first_key, typename Cta::ScoreAccumulator& s) {
  // The value whose exponent is minus infinity; S is not scaled yet in the plain kernel.
  const float hidden = Cta::general || cta.scale_log2 > 0 ? minus_infinity : -minus_infinity;
  const int own = opaque(first_key + cta.lane / 4);
  const int low = opaque(queries.low);
  const int high = opaque(queries.high);
#pragma unroll
  for (int q = 0; q < ScoreView<Cta>::queries; ++q) {
    const int r = query_of(cta, first_query, q);
    hide_outside<ScoreView<Cta>>(s, q, r + low - own, min(r + high, cta.key_count) - own, hidden);
  }
}

/// Adds the mask to S. `Element` is the type of the mask, std::byte for a boolean one. Queries and keys past
/// the end, which are hidden anyway, read the mask of the last one.
template <typename Element, typename Cta>
__device__ __forceinline__ void add_mask(const Cta& cta, const typename Cta::Queries& queries, int head,
                                         int first_query, int first_key, typename Cta::ScoreAccumulator& s) {
  using View = ScoreView<Cta>;
  const MaskView& mask = cta.call.mask;
  const auto* first = reinterpret_cast<const Element*>(mask.data) + cta.b * mask.stride[0] +
                      head * mask.stride[1] + queries.first * mask.stride[2] + cta.first_key * mask.stride[3];
  std::int64_t column[View::keys];
#pragma unroll
  for (int k = 0; k < View::keys; ++k) {
    const int key = key_of(cta, first_key, k);
    column[k] = min(key, cta.key_count - 1) * mask.stride[3];
  }
#pragma unroll
  for (int q = 0; q < View::queries; ++q) {
    const int r = query_of(cta, first_query, q);
    const Element* row = first + min(r, queries.count - 1) * mask.stride[2];
#pragma unroll
    for (int k = 0; k < View::keys; ++k) {
      float& score = View::at(s, q, k);
      if constexpr (std::is_same_v<Element, std::byte>) {
        if (row[column[k]] == std::byte{0}) score = minus_infinity;
      } else {
        const float bias = widen(row[column[k]]);
        score = bias == minus_infinity ? bias : score + bias;  // hides a NaN, too
      }
    }
  }
}

/// Turns products q·k into scores in natural units, in place. The derivatives of the softcap go to shared
/// memory.
template <typename Cta>
__device__ __forceinline__ void finish_scores(const Cta& cta, const typename Cta::Queries& queries,
                                              const QuerySteps& steps, bool edge, int first_query,
                                              int first_key, typename Cta::ScoreAccumulator& s) {
  using T = typename Cta::T;
  const AttentionCall& call = cta.call;
  const AttentionFeatures& features = call.problem.features;
  const int head = cta.head_of(steps);
  using View = ScoreView<Cta>;
  if (features.softcap) {
    const auto inner = static_cast<float>(call.scale_of(head) / call.softcap);
    const auto cap = static_cast<float>(call.softcap);
    View::each([&](int q, int k) {
      float& score = View::at(s, q, k);
      float& derivative = cta.derivative_smem(k / 2, q / 2, 2 * (k % 2) + q % 2);
      score = cap * tanh_of(score * inner, derivative);
    });
  } else {
    const auto factor = static_cast<float>(call.scale_of(head));
    View::each([&](int q, int k) { View::at(s, q, k) *= factor; });
  }
  if (features.alibi) {
    const auto slope = static_cast<float>(call.alibi_slopes.at(cta.b, head));
    const Sequence sequence = call.sequence(cta.b);
    const auto distance =
        static_cast<int>(queries.first + sequence.length_k - sequence.length_q - cta.first_key);
    View::each([&](int q, int k) {
      const int r = query_of(cta, first_query, q), key = key_of(cta, first_key, k);
      View::at(s, q, k) -= slope * static_cast<float>(abs(distance + r - key));
    });
  }
  if (features.mask == MaskKind::boolean) {
    add_mask<std::byte>(cta, queries, head, first_query, first_key, s);
  } else if (features.mask == MaskKind::additive && call.mask.dtype == DType::f32) {
    add_mask<float>(cta, queries, head, first_query, first_key, s);
  } else if (features.mask == MaskKind::additive) {
    add_mask<T>(cta, queries, head, first_query, first_key, s);
  }
  if (edge) hide(cta, queries, first_query, first_key, s);
  if (steps.tile >= 0) {
    const std::int64_t i = queries.first % call.blocks.block_q;
    const std::int64_t j = cta.first_key % call.blocks.block_k;
    View::each([&](int q, int k) {
      const int r = query_of(cta, first_query, q), key = key_of(cta, first_key, k);
      if (r >= queries.count || key >= cta.key_count) return;
      if (!call.blocks.tile_shows(steps.tile, i + r, j + key)) View::at(s, q, k) = minus_infinity;
    });
  }
}

/// The bit of an element of Sᵀ in a mask of those that dropout keeps.
constexpr unsigned kept_bit(int m, int n, int half, int e) { return 1u << ((2 * n + e) * 4 + 2 * m + half); }

/// The elements of a lane's Sᵀ that dropout keeps, as bits. Four neighbouring keys of a query share one draw
/// of Philox, and four lanes hold one of these keys each. So each of the lanes computes a quarter of the
/// draws, and they exchange them by shuffles.
template <typename Cta>
__device__ __forceinline__ unsigned draw_kept(const Cta& cta, const typename Cta::Queries& queries, int head,
                                              int first_query, int first_key) {
  constexpr int key_eights = 2 * std::extent_v<typename Cta::ScoreAccumulator, 0>;
  constexpr int query_count = 2 * std::extent_v<typename Cta::ScoreAccumulator, 1>;
  static_assert((key_eights == 2 || key_eights == 4) && query_count <= 8 &&
                query_count * key_eights % 4 == 0);
  const AttentionCall& call = cta.call;
  const DropoutMask dropout = call.dropout.drawn();
  const auto row = static_cast<std::uint32_t>(cta.b * call.problem.heads_q + head);
  const int own = cta.lane / 4 % 4;  // the lane among the four, and its key among the four
  const int i = queries.first + first_query + 2 * (cta.lane % 4);
  const int j = cta.first_key + first_key + cta.lane / 16 * 4;
  const auto query = [&](int q) { return static_cast<std::uint32_t>(i + q / 2 * 8 + q % 2); };
  unsigned kept = 0;
  if (cta.first_key % 4 != 0) {  // in a block mask whose sizes are no multiples of 4
#pragma unroll 1
    for (int index = 0; index < query_count * key_eights; ++index) {
      const int q = index / key_eights, eight = index % key_eights;
      if (dropout.keeps(row, query(q), static_cast<std::uint32_t>(j + 8 * eight + own))) {
        kept |= 1u << (4 * q + eight);
      }
    }
    return kept;
  }
  constexpr int draws = query_count * key_eights / 4;  // per lane, all for the same eight keys
  const int eight = own % key_eights;
  const int first = own / key_eights * draws;
  unsigned drawn = 0;
#pragma unroll 1
  for (int n = 0; n < draws; ++n) {
    const KeptFour kept_four =
        draw_four(dropout, static_cast<std::uint32_t>(j + 8 * eight) / 4, query(first + n), row);
    unsigned four = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) four |= kept_four.keeps[word] ? 1u << word : 0u;
    drawn |= four << (4 * n);
  }
#pragma unroll
  for (int other = 0; other < 4; ++other) {
    const unsigned theirs = __shfl_sync(~0u, drawn, cta.lane / 16 * 16 + other * 4 + cta.lane % 4);
    constexpr unsigned ones = draws == 8 ? 0x11111111u : (1u << (4 * draws % 32)) / 15;
    kept |= ((theirs >> own) & ones) << (other % key_eights + other / key_eights * draws * 4);
  }
  return kept;
}

// P and dS of a K tile by a Q tile. Both are held transposed, with one row per key: so the accumulators of Sᵀ
// and dPᵀ have the register layout of operand A in the products for dV and dK.

/// Calls `body` for each two neighbouring elements: with their register of the rounded fragments, which it
/// may change, their f32 values, and their position (m, n, half).
template <int query_tiles, int key_tiles, typename Body>
__device__ __forceinline__ void for_each_two(std::uint32_t (&rounded)[query_tiles][key_tiles][4],
                                             const Accumulator<key_tiles, query_tiles>& s, const Body& body) {
#pragma unroll
  for (int n = 0; n < 2 * query_tiles; ++n) {
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        body(rounded[n / 2][m][n % 2 * 2 + half], float2{s[m][n][2 * half], s[m][n][2 * half + 1]}, m, n,
             half);
      }
    }
  }
}

/// Rounds P again, with 0 for what dropout does not keep.
template <typename T, int query_tiles, int key_tiles>
__device__ __forceinline__ void drop(std::uint32_t (&p_fragments)[query_tiles][key_tiles][4],
                                     const Accumulator<key_tiles, query_tiles>& p, unsigned kept) {
  for_each_two(p_fragments, p, [&](std::uint32_t& two, float2 own, int m, int n, int half) {
    two = pack<T>((kept & kept_bit(m, n, half, 0)) != 0 ? own.x : 0.0f,
                  (kept & kept_bit(m, n, half, 1)) != 0 ? own.y : 0.0f);
  });
}

/// Stores fragments of P or dS to their tile in shared memory.
template <typename Cta, int query_tiles, int key_tiles>
__device__ __forceinline__ void store_fragments(const Cta& cta, std::byte* to_smem, int first_query,
                                                int first_key,
                                                const std::uint32_t (&fragments)[query_tiles][key_tiles][4]) {
  using Tile = typename Cta::ScoreTile;
#if __CUDA_ARCH__ >= 900
  if constexpr (Cta::config.matrix_stores) {
    const auto to = Cta::ScorePointer::by_rows(Cta::address(to_smem)).from(first_key, first_query / 16);
#pragma unroll
    for (int n = 0; n < query_tiles; ++n) {
#pragma unroll
      for (int m = 0; m < key_tiles; ++m) store_matrices(to.at(16 * m, n), fragments[n][m]);
    }
    return;
  }
#endif
  // Rows 8 apart have the same swizzle, so each address below is `at` with an exclusive or and a constant
  // offset.
  const int at = Tile::offset(first_key + cta.lane / 4, first_query / 8) + 4 * (cta.lane % 4);
#pragma unroll
  for (int n = 0; n < 2 * query_tiles; ++n) {
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = (at ^ (n * 16)) + (16 * m + 8 * half) * Tile::row_bytes;
        *reinterpret_cast<std::uint32_t*>(to_smem + step) = fragments[n / 2][m][n % 2 * 2 + half];
      }
    }
  }
}

/// Whether some of the tile's queries from `first_query` on see some of the keys from `first_key` on.
template <typename Queries>
__device__ __forceinline__ bool seen(const Queries& queries, int first_query, int query_count, int first_key,
                                     int keys) {
  const int last_query = min(first_query + query_count, queries.count) - 1;
  if (first_query > last_query) return false;
  return first_query + queries.low < first_key + keys && last_query + queries.high > first_key;
}

/// dP = dO·V becomes dP − delta + dLSE, in the scale of dS over that of P. Where dropout drops an element,
/// its dO·V is 0.
template <typename Cta>
__device__ __forceinline__ void subtract_delta(const Cta& cta, const float* minus_deltas, unsigned kept,
                                               typename Cta::ScoreAccumulator& dp) {
  using T = typename Cta::T;
  constexpr int key_tiles = std::extent_v<typename Cta::ScoreAccumulator, 0>;
  constexpr int query_eights = std::extent_v<typename Cta::ScoreAccumulator, 1>;
  const float scale = cta.scale.up / static_cast<float>(1 << p_scale_bits<T>);
  const float kept_unit = scale * cta.keep_scale();
#pragma unroll
  for (int n = 0; n < query_eights; ++n) {
    const float2 minus_delta = *reinterpret_cast<const float2*>(minus_deltas + 8 * n);
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float own = e % 2 == 0 ? minus_delta.x : minus_delta.y;
        float& value = dp[m][n][e];
        if constexpr (Cta::general) {
          value = fmaf((kept & kept_bit(m, n, e / 2, e % 2)) != 0 ? value : 0.0f, kept_unit, own * scale);
        } else {
          value = p_scale_bits<T> > 0 ? fmaf(value, scale, own * scale) : value + own;
        }
      }
    }
  }
}

/// Without scaling and dropout the accumulator of dP starts at dLSE − delta, and subtract_delta() is not
/// needed.
template <typename Cta>
inline constexpr bool starts_with_delta = !Cta::general && p_scale_bits<typename Cta::T> == 0;

template <int key_tiles, int query_eights>
__device__ __forceinline__ void start_with_minus_delta(const float* minus_deltas,
                                                       float (&dp)[key_tiles][query_eights][4]) {
#pragma unroll
  for (int n = 0; n < query_eights; ++n) {
    const float2 minus_delta = *reinterpret_cast<const float2*>(minus_deltas + 8 * n);
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) {
      dp[m][n][0] = dp[m][n][2] = minus_delta.x;
      dp[m][n][1] = dp[m][n][3] = minus_delta.y;
    }
  }
}

/// LSE of two neighbouring queries, with what the exponents of P need beside it.
template <typename Cta>
struct RowLse {
  using T = typename Cta::T;
  float2 lse, offset;

  __device__ __forceinline__ void load(const Cta& cta, int query) {
    lse = *reinterpret_cast<const float2*>(cta.lse_smem + query);
    if constexpr (Cta::general) {
      offset = *reinterpret_cast<const float2*>(cta.offset_smem() + query);
      offset.x += p_scale_bits<T>;
      offset.y += p_scale_bits<T>;
    } else {
      lse.x -= p_scale_bits<T>;
      lse.y -= p_scale_bits<T>;
    }
  }
  /// Turns two scores of a key into P, in place, and returns it rounded as well.
  __device__ __forceinline__ std::uint32_t exponentiate(const Cta& cta, float& low, float& high) const {
    if constexpr (Cta::general) {
      low = exp2_approx(fmaf(low - lse.x, log2e, offset.x));
      high = exp2_approx(fmaf(high - lse.y, log2e, offset.y));
    } else {
      low = exp2_approx(fmaf(low, cta.scale_log2, -lse.x));
      high = exp2_approx(fmaf(high, cta.scale_log2, -lse.y));
    }
    return pack<T>(low, high);
  }
};

/// dS = P·(dP − delta + dLSE), in place. The general kernel multiplies by the derivative of the score: that
/// of the softcap, and the logit scale of the tile's head.
template <typename Cta>
__device__ __forceinline__ void compute_ds(const Cta& cta, const QuerySteps& steps,
                                           const typename Cta::ScoreAccumulator& p,
                                           typename Cta::ScoreAccumulator& dp) {
  constexpr int key_tiles = std::extent_v<typename Cta::ScoreAccumulator, 0>;
  constexpr int query_eights = std::extent_v<typename Cta::ScoreAccumulator, 1>;
#pragma unroll
  for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < query_eights; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[m][n][e] *= p[m][n][e];
    }
  }
  if constexpr (Cta::general) {
    const auto multiply = [&](const auto& factor) {
#pragma unroll
      for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < query_eights; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) dp[m][n][e] *= factor(m, n, e);
        }
      }
    };
    if (cta.call.problem.features.softcap) {
      multiply([&](int m, int n, int e) { return cta.derivative_smem(m, n, e); });
    }
    if (cta.call.problem.features.logit_scale) {
      const float logit = logit_factor<typename Cta::T>(cta.call, cta.head_of(steps)).factor;
      multiply([&](int, int, int) { return logit; });
    }
  }
}

/// dV += Pᵀ·dO or dK += dSᵀ·Q with P or dS from registers.
template <BackwardConfig c, typename Cta, typename DkvAccumulator>
__device__ __forceinline__ void add_from_registers(DkvAccumulator& sum,
                                                   const typename Cta::ScoreFragments& fragments,
                                                   const std::byte* rows_smem, int first_query) {
  constexpr int key_tiles = c.score_key_tiles();
  multiply_tiles<typename Cta::T, c.score_query_tiles(), key_tiles, c.dkv_dim_tiles()>(
      sum,
      [&fragments](std::uint32_t(&to)[key_tiles][4], int step) {
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) to[m][e] = fragments[step][m][e];
        }
      },
      b_transposed(Cta::RowPointer::by_rows(Cta::address(rows_smem)).from(first_query, 0)));
}

/// P and dS of a warp's keys by `queries_at_once` queries. Where P stays in registers, also their
/// contribution to dV and dK.
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void compute_p_and_ds_step(Cta& cta, const QuerySteps& steps, bool edge, int stage,
                                                      int score_stage, int first_query) {
  using T = typename Cta::T;
  using RowPointer = typename Cta::RowPointer;
  constexpr int key_tiles = c.score_key_tiles();
  constexpr int query_tiles = c.score_query_tiles();
  const int key_warp = cta.warp / (c.warps / c.key_warps);
  const int first_key = key_warp * key_tiles * 16;
  const std::byte* q_tile = cta.q_smem + stage * c.query_bytes();
  const std::byte* d_o_tile = cta.d_o_smem + stage * c.query_bytes();
  const auto address = [](const std::byte* smem) { return Cta::address(smem); };
  typename Cta::ScoreFragments p_fragments, ds_fragments;
  const auto queries = [&] { return cta.queries_of(steps); };  // the plain kernel rarely needs it
  if (edge && !seen(queries(), first_query, c.queries_at_once, first_key, 16 * key_tiles)) {
    const typename Cta::ScoreFragments none = {};
    if constexpr (!c.weights_stay) store_fragments(cta, cta.p_at(score_stage), first_query, first_key, none);
    store_fragments(cta, cta.ds_at(score_stage), first_query, first_key, none);
    return;
  }

  typename Cta::ScoreAccumulator p = {}, dp = {};
  multiply_tiles<T, c.dim / 16, key_tiles, query_tiles>(
      p, a_by_rows<key_tiles>(RowPointer::by_rows(address(cta.k_smem)).from(first_key, 0)),
      b_by_rows(RowPointer::by_columns(address(q_tile)).from(first_query, 0)));
  unsigned kept = ~0u;
  const bool dropout = Cta::general && cta.call.problem.features.dropout;
  const auto make_scores = [&] {
    if constexpr (Cta::general) {
      finish_scores(cta, queries(), steps, edge, first_query, first_key, p);
      if (dropout) {
        kept = draw_kept(cta, queries(), cta.head_of(steps), first_query, first_key);
      }
      __syncwarp();  // the mask's branches may have diverged
    } else if (edge) {
      hide(cta, queries(), first_query, first_key, p);
    }
  };

  const int own_query = stage * c.queries + first_query + 2 * (cta.lane % 4);
  if constexpr (starts_with_delta<Cta>) start_with_minus_delta(cta.minus_delta_smem + own_query, dp);
  RowLse<Cta> row_lse;
  const auto exponentiate = [&](int n, int m, int half) {
    if (m == 0 && half == 0) row_lse.load(cta, own_query + 8 * n);
    p_fragments[n / 2][m][n % 2 * 2 + half] =
        row_lse.exponentiate(cta, p[m][n][2 * half], p[m][n][2 * half + 1]);
  };
  // P is computed between the steps of dP = dO·V, which does not need it.
  constexpr int product_steps = c.dim / 16;
  constexpr int twos = 4 * query_tiles * key_tiles;
  multiply_tiles<T, product_steps, key_tiles, query_tiles>(
      dp, a_by_rows<key_tiles>(RowPointer::by_rows(address(cta.v_smem)).from(first_key, 0)),
      b_by_rows(RowPointer::by_columns(address(d_o_tile)).from(first_query, 0)),
      [&](const std::uint32_t(&)[key_tiles][4], int step) {
#pragma unroll
        for (int index = 0; index < twos; ++index) {
          if (index * product_steps / twos != step) continue;
          exponentiate(index / (2 * key_tiles), index / 2 % key_tiles, index % 2);
        }
      },
      make_scores);
  if (dropout) drop<T>(p_fragments, p, kept);
  if constexpr (!starts_with_delta<Cta>) subtract_delta(cta, cta.minus_delta_smem + own_query, kept, dp);
  if constexpr (c.weights_stay) {
    add_from_registers<c, Cta>(cta.dv, p_fragments, d_o_tile, first_query);
  } else {
    store_fragments(cta, cta.p_at(score_stage), first_query, first_key, p_fragments);
  }

  compute_ds(cta, steps, p, dp);
  for_each_two(ds_fragments, dp,
               [](std::uint32_t& two, float2 own, int, int, int) { two = pack<T>(own.x, own.y); });
  store_fragments(cta, cta.ds_at(score_stage), first_query, first_key, ds_fragments);
  if constexpr (c.weights_stay) {
    if (cta.adds_dk(steps)) add_from_registers<c, Cta>(cta.dk, ds_fragments, q_tile, first_query);
  }
}

}  // namespace tilewise::cuda::mma
