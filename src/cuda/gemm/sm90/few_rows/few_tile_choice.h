#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gemm/sm90/few_rows/few_tile_tuning.h"
#include "cuda/gemm/sm90/few_rows/few_tiles.h"
#include "cuda/tile/tuning_table.h"
#include "gemm/problem.h"

namespace tilewise::cuda::gemm {

// Which GEMMs with few rows run by tiles (few_tile.cuh), and with which row of the tables. The others run by
// stream-K (few.cuh).

/// Tiles have as few rows of weights as fill all SMs once, a multiple of 4, so that the columns of each tile
/// of the result begin at multiples of 8 bytes. Where one copy loads several panels, a tile has all the rows
/// that a stage has room for, because such a copy leaves no gap between panels.
inline FewTiles tiles_of(const GemmProblem& problem, const FewTileConfig& c, int multiprocessors) {
  const std::int64_t tiles_at_once = std::max(multiprocessors / c.splits, 1);
  const std::int64_t even = ((problem.n + tiles_at_once - 1) / tiles_at_once + 3) / 4 * 4;
  const auto rows = c.panels > 1 ? c.rows : static_cast<int>(std::min<std::int64_t>(even, c.rows));
  return {.rows = rows,
          .tiles = static_cast<int>((problem.n + rows - 1) / rows),
          .splits = c.splits,
          .units = static_cast<int>((problem.k + c.depth() - 1) / c.depth())};
}

/// A row of the tables suits a problem that is like what the row was tuned on:
/// - its tokens are the fewest of 16, 32 and 64 that suffice; one token has its own kernel (stream.cuh), or
/// is
///   the second GEMM of a chain whose first one has;
/// - K is a multiple of 64 where one copy loads several panels;
/// - the CTAs are one round that leaves hardly an SM idle;
/// - copies are about as long: with fewer rows of weights there would be more of them, and each takes time
///   (docs/gemm.md).
inline bool suits_tiles(const GemmProblem& problem, const FewTileConfig& c, int multiprocessors) {
  const int least_tokens = c.tokens == 16 ? 2 : c.tokens / 2 + 1;
  if (problem.m < least_tokens || problem.m > c.tokens || problem.n == 0) return false;
  if (c.panels > 1 && problem.k % 64 != 0) return false;
  const FewTiles tiles = tiles_of(problem, c, multiprocessors);
  const bool one_round = tiles.blocks() <= multiprocessors && 16 * tiles.blocks() >= 15 * multiprocessors;
  return one_round && 8 * tiles.rows >= 7 * c.rows;
}

/// The row of a table that suits a problem, or -1.
template <typename Table>
int suited_row(const GemmProblem& problem, int multiprocessors) {
  return first_row<Table>([&](const FewTileConfig& c) { return suits_tiles(problem, c, multiprocessors); });
}

/// Whether a problem that few_rows takes runs by tiles.
inline bool runs_by_tiles(const GemmProblem& problem, int multiprocessors) {
  return (problem.gated ? suited_row<FewTileGated>(problem, multiprocessors)
                        : suited_row<FewTile>(problem, multiprocessors)) >= 0;
}

}  // namespace tilewise::cuda::gemm
