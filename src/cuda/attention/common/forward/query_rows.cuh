#pragma once

#include "cuda/attention/common/forward/few_results.h"
#include "cuda/attention/common/key_tiles.cuh"

namespace tilewise::cuda::mma {

/// The rows of a CTA: queries of one head or, where a head has few, of all `heads` query heads of a group.
/// Then the heads of a query are neighbouring rows, and queries.h is the first head.
struct QueryRows {
  QueryTile queries;
  int head_kv = 0;
  int heads = 1;
  int inverse = 0;  ///< 2^16 / heads, rounded up: r · inverse >> 16 is r / heads

  __device__ int count() const { return queries.count * heads; }
  /// Which query of the tile row r is, and of which head.
  __device__ int query(int r) const { return r * inverse >> 16; }
  __device__ std::int64_t head(int r) const { return queries.h + (r - query(r) * heads); }
  /// The address of row r in a tensor of 16-bit elements, and in one with one float per row.
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

/// How the queries of a call are cut into CTAs.
struct ForwardGrid {
  QueryGrid queries;
  Turns turns;
  int heads = 1;         ///< per CTA
  int inverse = 0;       ///< see QueryRows
  bool exact_p = false;  ///< see keeps_p_exact()

  static ForwardGrid of(const AttentionCall& call, int rows, int multiprocessors) {
    const std::int64_t group = call.group();
    // A CTA takes a whole group where one head would leave half of it empty. It has only one logit scale.
    const AttentionFeatures& features = call.problem.features;
    const bool together = group > 1 && group <= rows && 2 * choice_length_q(call.problem) <= rows &&
                          !features.block_mask && !features.logit_scale;
    const int heads = together ? static_cast<int>(group) : 1;
    const QueryGrid queries = QueryGrid::of(call, rows / heads);
    const std::int64_t key_bytes = call.problem.length_k * (call.problem.dim_qk + call.problem.dim_v) * 2;
    const Turns turns = Turns::of(call, call.problem.batch * (call.problem.heads_q / heads), queries.tiles,
                                  together ? key_bytes : key_bytes / group, multiprocessors);
    return {queries, turns, heads, (65536 + heads - 1) / heads, keeps_p_exact(call)};
  }
  std::int64_t count() const { return std::int64_t{turns.heads} * turns.tiles; }
  /// The rows of CTA `index`. Heads of a group follow each other, because they share keys in the L2. The last
  /// queries of a head come first, because with causal they see the most keys.
  __device__ QueryRows rows(const AttentionCall& call, std::uint32_t index) const {
    // Where a CTA takes a whole group, turns count key heads.
    const Turn turn = turns.turn(index);
    const auto [b, h] = turn.among(heads > 1 ? call.problem.heads_kv : call.problem.heads_q);
    const auto head_kv = static_cast<int>(heads > 1 ? h : h / static_cast<std::uint32_t>(call.group()));
    return {queries.tile(call, b, std::int64_t{h} * heads, queries.tiles - 1 - turn.tile), head_kv, heads,
            inverse};
  }
};

}  // namespace tilewise::cuda::mma
