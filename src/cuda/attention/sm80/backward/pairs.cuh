#pragma once

#include "cuda/attention/sm80/backward/block.cuh"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda::mma {

// Between a product k·q and its weight: what hides pairs, and in the general kernel all else that makes a
// score. What a call does not have is passed over by all lanes at once; the code for each part is there once
// a pair, in registers.

/// The view of a block's pairs, and where they are: query 8n + 2t + e of the tile, key 16m + 8h + g.
template <typename Block>
using PairView = MmaTransposedView<typename Block::PairSums>;
template <typename Block>
__device__ __forceinline__ int query_of(const Block& block, int first_query, int q) {
  return first_query + 8 * (q / 2) + 2 * (block.lane % 4) + q % 2;
}
template <typename Block>
__device__ __forceinline__ int key_of(const Block& block, int first_key, int k) {
  return first_key + PairView<Block>::step(k) + block.lane / 4;
}

/// Hides what the band hides, and keys past the end.
template <typename Block>
__device__ __forceinline__ void hide(const Block& block, const typename Block::Queries& queries,
                                     int first_query, int first_key, typename Block::PairSums& s) {
  // What has an exponent of minus infinity.
  const float hidden = Block::general || block.unit > 0 ? minus_infinity : -minus_infinity;
  const int own = opaque(first_key + block.lane / 4);
  const int low = opaque(queries.low);
  const int high = opaque(queries.high);
#pragma unroll
  for (int q = 0; q < PairView<Block>::queries; ++q) {
    const int r = query_of(block, first_query, q);
    hide_outside<PairView<Block>>(s, q, r + low - own, min(r + high, block.key_count) - own, hidden);
  }
}

/// Adds what the mask has for each pair. `Element` is its type, or std::byte for a boolean one. Pairs that
/// are not there, which are hidden anyway, meet the last that is.
template <typename Element, typename Block>
__device__ __forceinline__ void add_mask(const Block& block, const typename Block::Queries& queries, int head,
                                         int first_query, int first_key, typename Block::PairSums& s) {
  using View = PairView<Block>;
  const MaskView& mask = block.call.mask;
  const auto* first = reinterpret_cast<const Element*>(mask.data) + block.b * mask.stride[0] +
                      head * mask.stride[1] + queries.first * mask.stride[2] +
                      block.first_key * mask.stride[3];
  std::int64_t column[View::keys];
#pragma unroll
  for (int k = 0; k < View::keys; ++k) {
    const int key = key_of(block, first_key, k);
    column[k] = min(key, block.key_count - 1) * mask.stride[3];
  }
#pragma unroll
  for (int q = 0; q < View::queries; ++q) {
    const int r = query_of(block, first_query, q);
    const Element* row = first + min(r, queries.count - 1) * mask.stride[2];
#pragma unroll
    for (int k = 0; k < View::keys; ++k) {
      float& score = View::at(s, q, k);
      if constexpr (std::is_same_v<Element, std::byte>) {
        if (row[column[k]] == std::byte{0}) score = minus_infinity;
      } else {
        const float bias = widen(row[column[k]]);
        score = bias == minus_infinity ? bias : score + bias;  // whatever the score is
      }
    }
  }
}

/// Scores in natural units from products, in place; the softcap's derivatives go to shared memory.
template <typename Block>
__device__ __forceinline__ void finish_scores(const Block& block, const typename Block::Queries& queries,
                                              const QuerySteps& steps, bool edge, int first_query,
                                              int first_key, typename Block::PairSums& s) {
  using T = typename Block::T;
  const AttentionCall& call = block.call;
  const AttentionFeatures& features = call.problem.features;
  const int head = block.head_of(steps);
  using View = PairView<Block>;
  if (features.softcap) {
    const auto inner = static_cast<float>(call.scale_of(head) / call.softcap);
    const auto cap = static_cast<float>(call.softcap);
    View::each([&](int q, int k) {
      float& score = View::at(s, q, k);
      float& derivative = block.slope_smem(k / 2, q / 2, 2 * (k % 2) + q % 2);
      score = cap * tanh_of(score * inner, derivative);
    });
  } else {
    const auto factor = static_cast<float>(call.scale_of(head));
    View::each([&](int q, int k) { View::at(s, q, k) *= factor; });
  }
  if (features.alibi) {
    const auto slope = static_cast<float>(call.alibi_slopes.at(block.b, head));
    const Sequence sequence = call.sequence(block.b);
    const auto distance =
        static_cast<int>(queries.first + sequence.length_k - sequence.length_q - block.first_key);
    View::each([&](int q, int k) {
      const int r = query_of(block, first_query, q), key = key_of(block, first_key, k);
      View::at(s, q, k) -= slope * static_cast<float>(abs(distance + r - key));
    });
  }
  if (features.mask == MaskKind::boolean) {
    add_mask<std::byte>(block, queries, head, first_query, first_key, s);
  } else if (features.mask == MaskKind::additive && call.mask.dtype == DType::f32) {
    add_mask<float>(block, queries, head, first_query, first_key, s);
  } else if (features.mask == MaskKind::additive) {
    add_mask<T>(block, queries, head, first_query, first_key, s);
  }
  if (edge) hide(block, queries, first_query, first_key, s);
  if (steps.tile >= 0) {
    const std::int64_t i = queries.first % call.blocks.block_q;
    const std::int64_t j = block.first_key % call.blocks.block_k;
    View::each([&](int q, int k) {
      const int r = query_of(block, first_query, q), key = key_of(block, first_key, k);
      if (r >= queries.count || key >= block.key_count) return;
      if (!call.blocks.tile_shows(steps.tile, i + r, j + key)) View::at(s, q, k) = minus_infinity;
    });
  }
}

/// The bit of a pair among those that dropout keeps.
constexpr unsigned kept_bit(int m, int n, int half, int e) { return 1u << ((2 * n + e) * 4 + 2 * m + half); }

/// Which pairs of a lane dropout keeps. Four keys of a query share a draw, and four lanes have one of them
/// each; so each lane makes a quarter of the draws, and they tell each other.
template <typename Block>
__device__ __forceinline__ unsigned kept_pairs(const Block& block, const typename Block::Queries& queries,
                                               int head, int first_query, int first_key) {
  constexpr int key_eights = 2 * std::extent_v<typename Block::PairSums, 0>;
  constexpr int query_count = 2 * std::extent_v<typename Block::PairSums, 1>;
  static_assert((key_eights == 2 || key_eights == 4) && query_count <= 8 &&
                query_count * key_eights % 4 == 0);
  const AttentionCall& call = block.call;
  const DropoutMask dropout = call.dropout.drawn();
  const auto row = static_cast<std::uint32_t>(block.b * call.problem.heads_q + head);
  const int own = block.lane / 4 % 4;  // which of the four lanes, and of the four keys
  const int i = queries.first + first_query + 2 * (block.lane % 4);
  const int j = block.first_key + first_key + block.lane / 16 * 4;
  const auto query = [&](int q) { return static_cast<std::uint32_t>(i + q / 2 * 8 + q % 2); };
  unsigned kept = 0;
  if (block.first_key % 4 != 0) {  // in a block mask of odd sizes
#pragma unroll 1
    for (int index = 0; index < query_count * key_eights; ++index) {
      const int q = index / key_eights, eight = index % key_eights;
      if (dropout.keeps(row, query(q), static_cast<std::uint32_t>(j + 8 * eight + own))) {
        kept |= 1u << (4 * q + eight);
      }
    }
    return kept;
  }
  constexpr int draws = query_count * key_eights / 4;  // of a lane: those of one eight of keys
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
    const unsigned theirs = __shfl_sync(~0u, drawn, block.lane / 16 * 16 + other * 4 + block.lane % 4);
    constexpr unsigned ones = draws == 8 ? 0x11111111u : (1u << (4 * draws % 32)) / 15;
    kept |= ((theirs >> own) & ones) << (other % key_eights + other / key_eights * draws * 4);
  }
  return kept;
}

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
