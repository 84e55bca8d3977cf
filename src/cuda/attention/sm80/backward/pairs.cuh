#pragma once

#include "cuda/attention/sm80/backward/scores.cuh"

namespace tilewise::cuda::mma {

// Weights and score gradients of a tile of keys by a tile of queries. Pairs are held transposed, a row a key:
// so they come out of the products in the registers in which they go into those for dv and dk.

/// Calls `body` with each two neighbouring pairs of fragments: the rounded ones, which it may change, those
/// they came from, and where they are, (m, n, half).
template <int query_tiles, int key_tiles, typename Body>
__device__ __forceinline__ void for_each_two(std::uint32_t (&rounded)[query_tiles][key_tiles][4],
                                             const Sums<key_tiles, query_tiles>& pairs, const Body& body) {
#pragma unroll
  for (int n = 0; n < 2 * query_tiles; ++n) {
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        body(rounded[n / 2][m][n % 2 * 2 + half], float2{pairs[m][n][2 * half], pairs[m][n][2 * half + 1]}, m,
             n, half);
      }
    }
  }
}

/// Rounds weights again, those that dropout does not keep to 0.
template <typename T, int query_tiles, int key_tiles>
__device__ __forceinline__ void drop(std::uint32_t (&weights)[query_tiles][key_tiles][4],
                                     const Sums<key_tiles, query_tiles>& p, unsigned kept) {
  for_each_two(weights, p, [&](std::uint32_t& two, float2 own, int m, int n, int half) {
    two = pack<T>((kept & kept_bit(m, n, half, 0)) != 0 ? own.x : 0.0f,
                  (kept & kept_bit(m, n, half, 1)) != 0 ? own.y : 0.0f);
  });
}

/// Fragments of pairs to their place in shared memory.
template <typename Block, int query_tiles, int key_tiles>
__device__ __forceinline__ void store_pairs(const Block& block, std::byte* to_smem, int first_query,
                                            int first_key,
                                            const std::uint32_t (&pairs)[query_tiles][key_tiles][4]) {
  using Tile = typename Block::PairTile;
#if __CUDA_ARCH__ >= 900
  if constexpr (Block::config.matrix_stores) {
    const auto to = Block::PairPointer::by_rows(Block::address(to_smem)).from(first_key, first_query / 16);
#pragma unroll
    for (int n = 0; n < query_tiles; ++n) {
#pragma unroll
      for (int m = 0; m < key_tiles; ++m) store_matrices(to.at(16 * m, n), pairs[n][m]);
    }
    return;
  }
#endif
  // Rows 8 apart swizzle chunks alike, so that steps from here are an exclusive or and a constant.
  const int at = Tile::offset(first_key + block.lane / 4, first_query / 8) + 4 * (block.lane % 4);
#pragma unroll
  for (int n = 0; n < 2 * query_tiles; ++n) {
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = (at ^ (n * 16)) + (16 * m + 8 * half) * Tile::row_bytes;
        *reinterpret_cast<std::uint32_t*>(to_smem + step) = pairs[n / 2][m][n % 2 * 2 + half];
      }
    }
  }
}

/// Whether some of the tile's queries from `first_query` on sees some of the keys from `first_key` on.
template <typename Queries>
__device__ __forceinline__ bool seen(const Queries& queries, int first_query, int query_count, int first_key,
                                     int keys) {
  const int last_query = min(first_query + query_count, queries.count) - 1;
  if (first_query > last_query) return false;
  return first_query + queries.low < first_key + keys && last_query + queries.high > first_key;
}

/// d_o·v to x, d_o·v + shift, in the score gradients' scale over that of weights; what dropout does not keep
/// has no d_o·v.
template <typename Block>
__device__ __forceinline__ void add_shifts(const Block& block, const float* shifts, unsigned kept,
                                           typename Block::PairSums& x) {
  using T = typename Block::T;
  constexpr int key_tiles = std::extent_v<typename Block::PairSums, 0>;
  constexpr int query_eights = std::extent_v<typename Block::PairSums, 1>;
  const float unit = block.scale.up / static_cast<float>(1 << weight_bits<T>);
  const float kept_unit = unit * block.keep_scale();
#pragma unroll
  for (int n = 0; n < query_eights; ++n) {
    const float2 shift = *reinterpret_cast<const float2*>(shifts + 8 * n);
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float own = e % 2 == 0 ? shift.x : shift.y;
        float& value = x[m][n][e];
        if constexpr (Block::general) {
          value = fmaf((kept & kept_bit(m, n, e / 2, e % 2)) != 0 ? value : 0.0f, kept_unit, own * unit);
        } else {
          value = weight_bits<T> > 0 ? fmaf(value, unit, own * unit) : value + own;
        }
      }
    }
  }
}

/// Where nothing is scaled, the product begins with the shifts.
template <typename Block>
inline constexpr bool shifts_first = !Block::general && weight_bits<typename Block::T> == 0;

template <int key_tiles, int query_eights>
__device__ __forceinline__ void set_shifts(const float* shifts, float (&x)[key_tiles][query_eights][4]) {
#pragma unroll
  for (int n = 0; n < query_eights; ++n) {
    const float2 shift = *reinterpret_cast<const float2*>(shifts + 8 * n);
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) {
      x[m][n][0] = x[m][n][2] = shift.x;
      x[m][n][1] = x[m][n][3] = shift.y;
    }
  }
}

/// What weights of two neighbouring queries are relative to.
template <typename Block>
struct References {
  using T = typename Block::T;
  float2 top, offset;

  __device__ __forceinline__ void load(const Block& block, int query) {
    top = *reinterpret_cast<const float2*>(block.top_smem + query);
    if constexpr (Block::general) {
      offset = *reinterpret_cast<const float2*>(block.offset_smem() + query);
      offset.x += weight_bits<T>;
      offset.y += weight_bits<T>;
    } else {
      top.x -= weight_bits<T>;
      top.y -= weight_bits<T>;
    }
  }
  /// Scores of a key to weights, which are also given rounded.
  __device__ __forceinline__ std::uint32_t weigh(const Block& block, float& low, float& high) const {
    if constexpr (Block::general) {
      low = exp2_approx(fmaf(low - top.x, log2e, offset.x));
      high = exp2_approx(fmaf(high - top.y, log2e, offset.y));
    } else {
      low = exp2_approx(fmaf(low, block.unit, -top.x));
      high = exp2_approx(fmaf(high, block.unit, -top.y));
    }
    return pack<T>(low, high);
  }
};

/// dS: x times its weight and, in the general kernel, the derivative of the score: the softcap's slope, and
/// the logit scale of the steps' head.
template <typename Block>
__device__ __forceinline__ void make_dscores(const Block& block, const QuerySteps& steps,
                                             const typename Block::PairSums& p, typename Block::PairSums& x) {
  constexpr int key_tiles = std::extent_v<typename Block::PairSums, 0>;
  constexpr int query_eights = std::extent_v<typename Block::PairSums, 1>;
#pragma unroll
  for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < query_eights; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][n][e] *= p[m][n][e];
    }
  }
  if constexpr (Block::general) {
    const auto multiply = [&](const auto& factor) {
#pragma unroll
      for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < query_eights; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) x[m][n][e] *= factor(m, n, e);
        }
      }
    };
    if (block.call.problem.features.softcap) {
      multiply([&](int m, int n, int e) { return block.slope_smem(m, n, e); });
    }
    if (block.call.problem.features.logit_scale) {
      const float logit = logit_factor<typename Block::T>(block.call, block.head_of(steps)).factor;
      multiply([&](int, int, int) { return logit; });
    }
  }
}

/// Pairs that stay in registers times rows of their queries, to dv or dk.
template <BackwardConfig c, typename Block, typename OwnSums>
__device__ __forceinline__ void add_to_own(OwnSums& sum, const typename Block::PairFragments& pairs,
                                           const std::byte* rows_smem, int first_query) {
  constexpr int key_tiles = c.pair_key_tiles();
  multiply_tiles<typename Block::T, c.pair_query_tiles(), key_tiles, c.own_dim_tiles()>(
      sum,
      [&pairs](std::uint32_t(&to)[key_tiles][4], int step) {
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) to[m][e] = pairs[step][m][e];
        }
      },
      b_transposed(Block::RowPointer::by_rows(Block::address(rows_smem)).from(first_query, 0)));
}

/// Weights and score gradients of a warp's pairs, some queries at once; with weights that stay, their part of
/// dv and dk too.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void differentiate(Block& block, const QuerySteps& steps, bool edge, int stage,
                                              int pair_stage, int first_query) {
  using T = typename Block::T;
  using RowPointer = typename Block::RowPointer;
  constexpr int key_tiles = c.pair_key_tiles();
  constexpr int query_tiles = c.pair_query_tiles();
  const int key_warp = block.warp / (c.warps / c.key_warps);
  const int first_key = key_warp * key_tiles * 16;
  const std::byte* q_tile = block.q_smem + stage * c.query_bytes();
  const std::byte* d_o_tile = block.d_o_smem + stage * c.query_bytes();
  const auto address = [](const std::byte* smem) { return Block::address(smem); };
  typename Block::PairFragments weights, dscores;
  const auto queries = [&] { return block.queries_of(steps); };  // seldom asked for in the plain kernel
  if (edge && !seen(queries(), first_query, c.queries_at_once, first_key, 16 * key_tiles)) {
    const typename Block::PairFragments none = {};
    if constexpr (!c.weights_stay)
      store_pairs(block, block.weights_at(pair_stage), first_query, first_key, none);
    store_pairs(block, block.dscores_at(pair_stage), first_query, first_key, none);
    return;
  }

  typename Block::PairSums p = {}, x = {};
  multiply_tiles<T, c.dim / 16, key_tiles, query_tiles>(
      p, a_by_rows<key_tiles>(RowPointer::by_rows(address(block.k_smem)).from(first_key, 0)),
      b_by_rows(RowPointer::by_columns(address(q_tile)).from(first_query, 0)));
  unsigned kept = ~0u;
  const bool dropout = Block::general && block.call.problem.features.dropout;
  const auto make_scores = [&] {
    if constexpr (Block::general) {
      finish_scores(block, queries(), steps, edge, first_query, first_key, p);
      if (dropout) {
        kept = kept_pairs(block, queries(), block.head_of(steps), first_query, first_key);
      }
      __syncwarp();  // masks may have parted the lanes
    } else if (edge) {
      hide(block, queries(), first_query, first_key, p);
    }
  };

  const int own_query = stage * c.queries + first_query + 2 * (block.lane % 4);
  if constexpr (shifts_first<Block>) set_shifts(block.shift_smem + own_query, x);
  References<Block> references;
  const auto weigh = [&](int n, int m, int half) {
    if (m == 0 && half == 0) references.load(block, own_query + 8 * n);
    weights[n / 2][m][n % 2 * 2 + half] = references.weigh(block, p[m][n][2 * half], p[m][n][2 * half + 1]);
  };
  // Weights are made beside the product that does not need them.
  constexpr int product_steps = c.dim / 16;
  constexpr int pairs = 4 * query_tiles * key_tiles;
  multiply_tiles<T, product_steps, key_tiles, query_tiles>(
      x, a_by_rows<key_tiles>(RowPointer::by_rows(address(block.v_smem)).from(first_key, 0)),
      b_by_rows(RowPointer::by_columns(address(d_o_tile)).from(first_query, 0)),
      [&](const std::uint32_t(&)[key_tiles][4], int step) {
#pragma unroll
        for (int index = 0; index < pairs; ++index) {
          if (index * product_steps / pairs != step) continue;
          weigh(index / (2 * key_tiles), index / 2 % key_tiles, index % 2);
        }
      },
      make_scores);
  if (dropout) drop<T>(weights, p, kept);
  if constexpr (!shifts_first<Block>) add_shifts(block, block.shift_smem + own_query, kept, x);
  if constexpr (c.weights_stay) {
    add_to_own<c, Block>(block.dv, weights, d_o_tile, first_query);
  } else {
    store_pairs(block, block.weights_at(pair_stage), first_query, first_key, weights);
  }

  make_dscores(block, steps, p, x);
  for_each_two(dscores, x,
               [](std::uint32_t& two, float2 own, int, int, int) { two = pack<T>(own.x, own.y); });
  store_pairs(block, block.dscores_at(pair_stage), first_query, first_key, dscores);
  if constexpr (c.weights_stay) {
    if (block.adds_dk(steps)) add_to_own<c, Block>(block.dk, dscores, q_tile, first_query);
  }
}

}  // namespace tilewise::cuda::mma
