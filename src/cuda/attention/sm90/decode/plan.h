#pragma once

#include <cstddef>

#include "attention/call.h"

namespace tilewise::cuda::wgmma {

/// How the work of a decoding call is split: packed GQA and split-KV.
struct DecodePlan {
  int heads_log2 = 0;  ///< of packed heads: they share a KV head, and their queries are rows of one tile
  int splits = 0;      ///< splits of the keys of a Q tile; 0: another kernel computes the call
};

/// The number of heads that share a KV head and can be packed into one tile: a power of two, or 1 where heads
/// differ in more than their queries, such as in an ALiBi slope.
std::int64_t packed_heads(const AttentionProblem& problem);

/// The partial results of splits in the workspace, behind the word of the tile counter.
struct SplitSpace {
  static constexpr std::size_t counter_bytes = 64;
  std::int64_t rows = 0;  ///< query rows of all heads
  std::int64_t row_floats = 0;
  int splits = 0;

  static SplitSpace of(const AttentionCall& call, const DecodePlan& plan) {
    return {.rows = call.rows_q() * call.problem.heads_q,
            .row_floats = (call.problem.dim_v + 1) / 2 * 2,
            .splits = plan.splits > 1 ? plan.splits : 0};
  }
  std::size_t o_bytes() const { return static_cast<std::size_t>(splits * rows * row_floats) * sizeof(float); }
  std::size_t bytes() const {
    return counter_bytes + o_bytes() + static_cast<std::size_t>(splits * rows) * sizeof(float);
  }
};

}  // namespace tilewise::cuda::wgmma
