#pragma once

#include <cstddef>

#include "attention/call.h"

namespace tilewise::cuda::wgmma {

/// How a call of few queries is cut.
struct FewPlan {
  int heads_log2 = 0;  ///< of heads that share keys, whose queries stand together in a tile
  int shares = 0;      ///< that the keys of a tile are cut into; 0: other kernels take the call
};

/// Heads that share a key head and whose queries may stand together in a tile: their number is a power of
/// two, and a head has nothing of its own.
std::int64_t heads_together(const AttentionProblem& problem);

/// Where the shares' results stand in the workspace, behind the word that tiles are counted by.
struct ShareSpace {
  static constexpr std::size_t counter_bytes = 64;
  std::int64_t rows = 0;  ///< of queries of all heads
  std::int64_t row_floats = 0;
  int shares = 0;

  static ShareSpace of(const AttentionCall& call, const FewPlan& plan) {
    return {.rows = call.rows_q() * call.problem.heads_q,
            .row_floats = (call.problem.dim_v + 1) / 2 * 2,
            .shares = plan.shares > 1 ? plan.shares : 0};
  }
  std::size_t o_bytes() const { return static_cast<std::size_t>(shares * rows * row_floats) * sizeof(float); }
  std::size_t bytes() const {
    return counter_bytes + o_bytes() + static_cast<std::size_t>(shares * rows) * sizeof(float);
  }
};

}  // namespace tilewise::cuda::wgmma
