#pragma once

#include "cuda/tile/key_tiles.cuh"

namespace tilewise::cuda::mma {

/// The rows of a block: queries of one head or, where those are few, of `heads` query heads that share a key
/// head, all heads of a query together. What queries.h says is the first of them.
struct QueryRows {
  QueryTile queries;
  int heads = 1;

  __device__ int count() const { return queries.count * heads; }
  /// Of row r: which query it is of the tile's, and of which head.
  __device__ int query(int r) const { return heads == 1 ? r : r / heads; }
  __device__ std::int64_t head(int r) const { return queries.h + (heads == 1 ? 0 : r % heads); }
  __device__ std::byte* row_of(const Rows& rows, int r) const {
    return rows.at(queries.b, head(r), queries.sequence.first_q + queries.first + query(r));
  }
};

/// How a problem's queries are cut into blocks.
struct QueryBlocks {
  QueryGrid queries;
  int heads = 1;  ///< in a block

  static QueryBlocks of(const AttentionCall& call, int rows) {
    const std::int64_t group = call.group();
    // A block takes a whole group where one head would leave half of it empty.
    const bool together =
        group > 1 && group <= rows && 2 * call.problem.length_q <= rows && !call.problem.features.block_mask;
    const int heads = together ? static_cast<int>(group) : 1;
    return {QueryGrid::of(call, rows / heads), heads};
  }
  std::int64_t count(const AttentionCall& call) const {
    return call.problem.batch * (call.problem.heads_q / heads) * queries.tiles;
  }
  /// Heads one after another, those of a group too, since they share keys in the cache; and of each the last
  /// queries first: with causal they see the most keys.
  __device__ QueryRows rows(const AttentionCall& call, std::int64_t index) const {
    const std::int64_t head = index / queries.tiles * heads;
    return {queries.tile(call, head / call.problem.heads_q, head % call.problem.heads_q,
                         queries.tiles - 1 - index % queries.tiles),
            heads};
  }
};

}  // namespace tilewise::cuda::mma
