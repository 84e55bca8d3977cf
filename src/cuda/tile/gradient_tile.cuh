#pragma once

#include "cuda/tile/key_tiles.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace tilewise::cuda {

// What every gradient needs: weights and score gradients of a tile of queries by a tile of keys, recomputed.
// One side is `own`, the rows of the thread grid, kept by the block; the other passes by. Either may be the
// queries.

/// The statistics of a query that backward reads.
struct RowState {
  float lse;    ///< +inf for a row that saw nothing, whose weights are then 0
  float shift;  ///< d_lse − Σ_d d_o·o
};

/// `shifts` is [Hq, rows_q].
__device__ __forceinline__ RowState row_state(const AttentionCall& call, const QueryTile& query, int r,
                                              const float* shifts) {
  if (r >= query.count) return {__builtin_huge_valf(), 0.0f};
  const std::int64_t s = query.sequence.first_q + query.first + r;
  const float lse = *reinterpret_cast<const float*>(call.lse.at(query.b, query.h, s));
  return {lse == minus_infinity ? __builtin_huge_valf() : lse,
          shifts[query.h * call.rows_q() + call.first_row_q(query.b) + query.first + r]};
}

/// Turns products into weights (after dropout) and score gradients of one pair. `dscore` enters as d_o·v and
/// leaves as the gradient of the score, or, times `slope`, that of scale·q·k.
struct PairGradient {
  float weight;
  float dscore;
  float slope;
};

template <bool features>
__device__ __forceinline__ PairGradient pair_gradient(const AttentionCall& call, const ScoreRules& rules,
                                                      const QueryTile& query, const KeyTile& keys, bool edge,
                                                      int r, int c, const RowState& row, float product,
                                                      float dweight) {
  const std::int64_t i = query.first + r;
  const std::int64_t j = keys.first + c;
  float slope = 1;
  float factor = 1;
  float s;
  if constexpr (features) {
    if (r >= query.count || (edge && hidden(call, query.sequence, keys, i, j))) return {0.0f, 0.0f, 0.0f};
    float tangent = 0;
    s = score_of(call, rules, query.sequence, query.b, query.h, i, j, product, tangent);
    if (rules.softcap) slope = 1 - tangent * tangent;
    if (call.problem.features.dropout) factor = dropout_factor(call, query.b, query.h, i, j);
  } else {
    s = product * rules.scale;
    if (edge) {
      const KeyRange range = call.keys_of(query.sequence, i);
      if (j < range.first || j >= range.last || c >= keys.count) s = minus_infinity;
    }
  }
  const float weight = exp2_approx((s - row.lse) * log2e);
  return {weight * factor, weight * fmaf(dweight, factor, row.shift), slope};
}

/// What the block mask says of key block `kb` for the queries of block row `qb`.
__device__ __forceinline__ std::int32_t block_state(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                                    std::int64_t qb, std::int64_t kb) {
  const BlockView& blocks = call.blocks;
  if (blocks.full_counts.data != nullptr) {
    for (int slot = 0; slot < blocks.full_counts.at(b, h, qb); ++slot) {
      if (blocks.full_indices.at(b, h, qb, slot) == kb) return block_full;
    }
  }
  for (int slot = 0; slot < blocks.counts.at(b, h, qb); ++slot) {
    if (blocks.indices.at(b, h, qb, slot) != kb) continue;
    return blocks.tile_ids.data == nullptr ? block_full : blocks.tile_ids.at(b, h, qb, slot);
  }
  return block_hidden;
}

/// Whether a query tile sees anything of a key tile that lies inside one key block; sets keys.tile.
__device__ __forceinline__ bool meets(const AttentionCall& call, const QueryTile& query, KeyTile& keys) {
  if (query.count <= 0) return false;
  const KeyRange any = query.any(call);
  if (keys.first >= any.last || keys.first + keys.count <= any.first) return false;
  keys.tile = block_full;
  if (!call.problem.features.block_mask) return true;
  keys.tile = block_state(call, query.b, query.h, query.first / call.blocks.block_q,
                          keys.first / call.blocks.block_k);
  return keys.tile != block_hidden;
}

/// How the keys of a head are cut into tiles that stay inside a key block.
struct KeyGrid {
  std::int64_t tiles = 0;
  std::int64_t tiles_per_block = 0;  ///< with a block mask
  int size = 0;

  static KeyGrid of(const AttentionCall& call, int size) {
    const std::int64_t length = call.problem.length_k;
    if (!call.problem.features.block_mask) return {(length + size - 1) / size, 0, size};
    const std::int64_t block = call.blocks.block_k;
    const std::int64_t per_block = (block + size - 1) / size;
    return {(length + block - 1) / block * per_block, per_block, size};
  }

  constexpr KeyTile tile(const AttentionCall& call, const Sequence& sequence, std::int64_t index) const {
    KeyTile keys{.first = index * size, .count = 0, .tile = block_full};
    std::int64_t end = sequence.length_k;
    if (tiles_per_block > 0) {
      const std::int64_t block = index / tiles_per_block;
      keys.first = block * call.blocks.block_k + index % tiles_per_block * size;
      end = std::min(end, (block + 1) * call.blocks.block_k);
    }
    keys.count = static_cast<int>(std::max<std::int64_t>(std::min<std::int64_t>(size, end - keys.first), 0));
    return keys;
  }
};

}  // namespace tilewise::cuda
