#pragma once

#include "cuda/attention/common/forward/few_results.h"
#include "cuda/attention/common/key_tiles.cuh"

namespace tilewise::cuda::mma {

/// The rows of a block: queries of one head or, where those are few, of `heads` query heads that share a key
/// head, all heads of a query together. What queries.h says is the first of them.
struct QueryRows {
  QueryTile queries;
  int head_kv = 0;
  int heads = 1;
  int inverse = 0;  ///< 2^16 over heads, rounded up: products with row numbers have the right upper bits

  __device__ int count() const { return queries.count * heads; }
  /// Of row r: which query it is of the tile's, and of which head.
  __device__ int query(int r) const { return r * inverse >> 16; }
  __device__ std::int64_t head(int r) const { return queries.h + (r - query(r) * heads); }
  /// Where row r is in a tensor of 16-bit elements, and in one of a float a row.
  __device__ std::byte* row_of(const Rows& rows, int r) const { return rows.data + offset(rows, r) * 2; }
  __device__ float* float_of(const Rows& rows, int r) const {
    return reinterpret_cast<float*>(rows.data) + offset(rows, r);
  }

 private:
  __device__ std::int64_t offset(const Rows& rows, int r) const {
    return queries.b * rows.stride_b + head(r) * rows.stride_h +
           (queries.sequence.first_q + queries.first + query(r)) * rows.stride_s;
  }
};

/// How a problem's queries are cut into blocks.
struct QueryBlocks {
  QueryGrid queries;
  Turns turns;
  int heads = 1;               ///< in a block
  int inverse = 0;             ///< see QueryRows
  bool exact_weights = false;  ///< see few_results()

  static QueryBlocks of(const AttentionCall& call, int rows, int multiprocessors) {
    const std::int64_t group = call.group();
    // A block takes a whole group where one head would leave half of it empty. It has one scale.
    const AttentionFeatures& features = call.problem.features;
    const bool together = group > 1 && group <= rows && 2 * call.problem.length_q <= rows &&
                          !features.block_mask && !features.logit_scale;
    const int heads = together ? static_cast<int>(group) : 1;
    const QueryGrid queries = QueryGrid::of(call, rows / heads);
    const std::int64_t key_bytes = call.problem.length_k * (call.problem.dim_qk + call.problem.dim_v) * 2;
    const Turns turns = Turns::of(call, call.problem.batch * (call.problem.heads_q / heads), queries.tiles,
                                  together ? key_bytes : key_bytes / group, multiprocessors);
    return {queries, turns, heads, (65536 + heads - 1) / heads, few_results(call)};
  }
  std::int64_t count() const { return std::int64_t{turns.heads} * turns.tiles; }
  /// In turn, those of a group after one another, since they share keys in the cache; and of each head the
  /// last queries first: with causal they see the most keys.
  __device__ QueryRows rows(const AttentionCall& call, std::uint32_t index) const {
    // Together, heads are those of the keys.
    const Turn turn = turns.turn(index);
    const auto [b, h] = turn.among(heads > 1 ? call.problem.heads_kv : call.problem.heads_q);
    const auto head_kv = static_cast<int>(heads > 1 ? h : h / static_cast<std::uint32_t>(call.group()));
    return {queries.tile(call, b, std::int64_t{h} * heads, queries.tiles - 1 - turn.tile), head_kv, heads,
            inverse};
  }
};

}  // namespace tilewise::cuda::mma
