#pragma once

#include <algorithm>
#include <cstddef>

#include "attention/call.h"

namespace tilewise::cuda::mma {

/// Where CTAs are too few to fill the GPU, several share a Q tile, each with a split of the keys. Their
/// partial O is written to the workspace, and a second kernel combines it (Flash-Decoding). The f32 results
/// of a piece take the same way, with at least two splits (common/pieces.h).
struct Splits {
  int count = 1;
  std::int64_t rows = 0;  ///< of all heads
  std::int64_t dim_v = 0;
  float* space = nullptr;

  static Splits of(const AttentionCall& call, int count, void* space) {
    return {count, call.rows_q() * call.problem.heads_q, call.problem.dim_v, static_cast<float*>(space)};
  }
  std::size_t bytes() const {
    return count == 1 ? 0 : static_cast<std::size_t>(count * rows * (dim_v + 3)) * sizeof(float);
  }
  /// The number of row i of entry b's queries and head h.
  static constexpr std::int64_t row(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                    std::int64_t i) {
    return h * call.rows_q() + call.first_row_q(b) + i;
  }
  /// A row's partial O, not normalised, relative to the maximum.
  constexpr float* o(int split, std::int64_t row_) const { return space + (split * rows + row_) * dim_v; }
  /// Three numbers of a row: its maximum, in natural units, and relative to it the sums of P in f32 and of P
  /// as rounded for P·V.
  constexpr float* state(int split, std::int64_t row_) const {
    return space + count * rows * dim_v + (split * rows + row_) * 3;
  }
};

/// One for each thread of the combine kernel.
inline constexpr std::int64_t most_splits = 128;

/// How many splits a call's keys are cut into, where `ctas` CTAs would run without splits and `room` fit
/// into the GPU. A split of few tiles does not pay for its CTA.
inline int splits_of(const AttentionCall& call, std::int64_t ctas, std::int64_t room, int keys) {
  constexpr std::int64_t least_tiles = 4;
  const std::int64_t least = call.problem.piece.wide_rows ? 2 : 1;
  if (call.problem.features.block_mask || ctas == 0) return static_cast<int>(least);
  const std::int64_t tiles = (call.problem.length_k + keys - 1) / keys;
  return static_cast<int>(
      std::clamp<std::int64_t>(std::min(room / ctas, tiles / least_tiles), least, most_splits));
}

/// Combines the splits: writes O and LSE.
void combine_splits(const AttentionCall& call, const Splits& splits, void* stream);

}  // namespace tilewise::cuda::mma
