#pragma once

#include <algorithm>

#include "cuda/gemm/few_rows.cuh"
#include "cuda/gemm/few_tile.cuh"

namespace tilewise::cuda::gemm {

// From a product to the kernel for few rows by tiles.

/// Whether rows have pieces that can come to the L2 by FewWeights and FewRuns.
inline bool has_pieces(const GemmProblem& problem) { return problem.k >= FewWeights::piece; }

/// As few rows a tile as fill all multiprocessors once, in fours, so that columns of a tile begin at
/// multiples of 8 bytes.
inline FewTiles tiles_of(const GemmProblem& problem, const FewTileConfig& c, int splits,
                         int multiprocessors) {
  const std::int64_t at_a_time = std::max(multiprocessors / splits, 1);
  const std::int64_t even = ((problem.n + at_a_time - 1) / at_a_time + 3) / 4 * 4;
  const auto rows = c.slabs ? c.rows : static_cast<int>(std::min<std::int64_t>(even, c.rows));
  return FewTiles::of(rows, static_cast<int>((problem.n + rows - 1) / rows), splits,
                      static_cast<int>((problem.k + c.summands() - 1) / c.summands()), c.summands());
}

/// Floats of the sums that blocks leave to others; there is a flag for each warpgroup of a block.
inline std::int64_t partials_of(const FewTiles& tiles, const FewTileConfig& c) {
  return tiles.splits > 1 ? std::int64_t{tiles.blocks()} * c.partial_floats() : 0;
}

/// How long pieces of rows come to the L2 before they are loaded, and how long before.
struct FewRunLength {
  int pieces = 2;  ///< of 256 summands
  int lead = 4;    ///< units, beside those of a run and those under way
};

template <FewTileConfig c>
FewRuns runs_of(const GemmCall& call, const FewTiles& tiles, const FewRunLength& length) {
  static_assert(FewWeights::piece % c.summands() == 0);
  FewRuns runs{};
  runs.pieces = length.pieces;
  runs.units = length.pieces * FewWeights::piece / c.summands();
  runs.rows = (tiles.rows + runs.units - 1) / runs.units;
  runs.lead = length.lead + runs.units;
  const auto map = [&](const Matrix& factor) {
    return map_of_runs(factor.data, factor.dtype, factor.rows, factor.columns, factor.stride_row, runs.rows,
                       runs.pieces);
  };
  runs.b = map(call.b);
  runs.gate = c.gated ? map(call.gate) : runs.b;
  return runs;
}

template <typename T, typename Table, int row>
void run_few_tile(const GemmCall& call, const FewSpace& space, const FewTiles& tiles, FewTurn turn,
                  const FewOverlap& overlap, const FewRunLength& length, cudaStream_t stream) {
  constexpr FewTileConfig c = Table::rows[row];
  const GemmProblem& problem = call.problem;
  const auto map = [&](const Matrix& factor, int box) {
    return c.slabs ? map_of_panels(factor.data, factor.dtype, factor.rows, factor.columns, factor.stride_row,
                                   box, c.panels)
                   : map_of_matrix(factor.data, factor.dtype, factor.rows, factor.columns, factor.stride_row,
                                   box);
  };
  FewTileMaps maps{.a = map(call.a, c.tokens), .b = map(call.b, tiles.rows)};
  maps.gate = c.gated ? map(call.gate, tiles.rows) : maps.b;
  FewRuns runs{};
  if constexpr (c.runs) runs = runs_of<c>(call, tiles, length);
  const FewTileArguments arguments{.tiles = tiles,
                                   .m = static_cast<int>(problem.m),
                                   .n = static_cast<int>(problem.n),
                                   .epilogue = Epilogue::of(call),
                                   .partials = space.partials,
                                   .flags = space.flags,
                                   .owner = new_owner()};
  launch<few_tile_kernel<T, Table, row>>({.name = "tilewise gemm of few rows by tiles",
                                          .blocks = tiles.tiles,
                                          .threads = c.threads,
                                          .layers = tiles.splits,
                                          .shared_bytes = few_bytes(c.shared_bytes(), turn, overlap),
                                          .stream = stream,
                                          .early = turn == FewTurn::second},
                                         maps, runs, arguments, overlap);
}

}  // namespace tilewise::cuda::gemm
