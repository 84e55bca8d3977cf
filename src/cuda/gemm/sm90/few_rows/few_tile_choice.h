#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gemm/sm90/few_rows/few_tile_tuning.h"
#include "cuda/gemm/sm90/few_rows/few_tiles.h"
#include "cuda/tile/tuning_table.h"
#include "gemm/problem.h"

namespace tilewise::cuda::gemm {

// Which products with few rows run by tiles, and by which row of the tables; the others share weights out
// evenly (FewShare).

/// As few rows a tile as fill all multiprocessors once, in fours, so that columns of a tile begin at
/// multiples of 8 bytes. Where a copy has several panels they are all that there are places for: it leaves
/// none between them.
inline FewTiles tiles_of(const GemmProblem& problem, const FewTileConfig& c, int multiprocessors) {
  const std::int64_t at_a_time = std::max(multiprocessors / c.splits, 1);
  const std::int64_t even = ((problem.n + at_a_time - 1) / at_a_time + 3) / 4 * 4;
  const auto rows = c.panels > 1 ? c.rows : static_cast<int>(std::min<std::int64_t>(even, c.rows));
  return {.rows = rows,
          .tiles = static_cast<int>((problem.n + rows - 1) / rows),
          .splits = c.splits,
          .units = static_cast<int>((problem.k + c.summands() - 1) / c.summands())};
}

/// A product suits a row of the tables where it is like what the row was tuned on:
/// - as many tokens, of 16, 32 and 64: one alone has another way (stream.cuh), or a first product that has;
/// - whole panels, where a copy has several;
/// - one round of blocks, that leaves hardly a multiprocessor idle;
/// - copies about as long: of few rows they are many, and each costs time (docs/gemm.md).
inline bool suits_tiles(const GemmProblem& problem, const FewTileConfig& c, int multiprocessors) {
  const int least_tokens = c.tokens == 16 ? 2 : c.tokens / 2 + 1;
  if (problem.m < least_tokens || problem.m > c.tokens || problem.n == 0) return false;
  if (c.panels > 1 && problem.k % 64 != 0) return false;
  const FewTiles tiles = tiles_of(problem, c, multiprocessors);
  const bool one_round = tiles.blocks() <= multiprocessors && 16 * tiles.blocks() >= 15 * multiprocessors;
  return one_round && 8 * tiles.rows >= 7 * c.rows;
}

/// The row of a table that a product suits, or none.
template <typename Table>
int suited_row(const GemmProblem& problem, int multiprocessors) {
  return first_row<Table>([&](const FewTileConfig& c) { return suits_tiles(problem, c, multiprocessors); });
}

/// Whether a product with few rows runs by tiles.
inline bool runs_by_tiles(const GemmProblem& problem, int multiprocessors) {
  return (problem.gated ? suited_row<FewTileGated>(problem, multiprocessors)
                        : suited_row<FewTile>(problem, multiprocessors)) >= 0;
}

}  // namespace tilewise::cuda::gemm
