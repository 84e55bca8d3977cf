#pragma once

#include <algorithm>
#include <cstddef>

#include "attention/call.h"

namespace tilewise::cuda::mma {

/// Where blocks are too few to fill the GPU, several share a tile of queries, each with a split of the keys.
/// What they find waits in the workspace until a second kernel joins it (flash-decoding's idea). So do f32
/// results of a piece, in two splits at the least (common/pieces.h).
struct Splits {
  int count = 1;
  std::int64_t rows = 0;  ///< of all heads
  std::int64_t dim_v = 0;
  float* space = nullptr;

  /// The maximum of a row's scores, in natural units, and relative to it the sums of its weights as they are
  /// and as o has them.
  struct State {
    float maximum, sum, rounded;
  };

  static Splits of(const AttentionCall& call, int count, void* space) {
    return {count, call.rows_q() * call.problem.heads_q, call.problem.dim_v, static_cast<float*>(space)};
  }
  std::size_t bytes() const {
    return count == 1 ? 0 : static_cast<std::size_t>(count * rows * (dim_v + 3)) * sizeof(float);
  }
  /// Row i of entry b's queries and head h among all.
  static constexpr std::int64_t row(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                    std::int64_t i) {
    return h * call.rows_q() + call.first_row_q(b) + i;
  }
  /// A row's sum of values, relative to the maximum.
  constexpr float* o(int split, std::int64_t row_) const { return space + (split * rows + row_) * dim_v; }
  constexpr float* state(int split, std::int64_t row_) const {
    return space + count * rows * dim_v + (split * rows + row_) * 3;
  }
};

/// One for each thread that joins them.
inline constexpr std::int64_t most_splits = 128;

/// How many splits a call's keys are cut into where `blocks` blocks would run and there is room for `room`. A
/// split of few tiles is not worth its block.
inline int splits_of(const AttentionCall& call, std::int64_t blocks, std::int64_t room, int keys) {
  constexpr std::int64_t least_tiles = 4;
  const std::int64_t least = call.problem.piece.wide_rows ? 2 : 1;
  if (call.problem.features.block_mask || blocks == 0) return static_cast<int>(least);
  const std::int64_t tiles = (call.problem.length_k + keys - 1) / keys;
  return static_cast<int>(
      std::clamp<std::int64_t>(std::min(room / blocks, tiles / least_tiles), least, most_splits));
}

/// Joins the splits: writes o and lse.
void combine_splits(const AttentionCall& call, const Splits& splits, void* stream);

}  // namespace tilewise::cuda::mma
