#pragma once

#include <algorithm>

#include "cuda/gemm/sm90/few_rows/few_tile.cuh"
#include "cuda/gemm/sm90/few_rows/few_tile_choice.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tensor_map.h"

namespace tilewise::cuda::gemm {

// From a product to the kernel for few rows by tiles.

template <typename T, typename Table, int row>
void run_few_tile_row(const GemmCall& call, const FewSpace& space, int multiprocessors, FewTurn turn,
                      cudaStream_t stream) {
  constexpr FewTileConfig c = Table::rows[row];
  const FewTiles tiles = tiles_of(call.problem, c, multiprocessors);
  const auto map = [&](const Matrix& factor, int box) {
    return c.panels > 1 ? map_of_panels(factor.data, factor.dtype, factor.rows, factor.columns,
                                        factor.stride_row, box, c.panels)
                        : map_of_matrix(factor.data, factor.dtype, factor.rows, factor.columns,
                                        factor.stride_row, box);
  };
  launch<few_tile_kernel<T, Table, row>>(
      {.name = "tilewise gemm of few rows by tiles",
       .blocks = tiles.tiles,
       .threads = c.threads,
       .layers = tiles.splits,
       .shared_bytes = turn == FewTurn::second ? std::max(c.shared_bytes(), late_bytes) : c.shared_bytes(),
       .stream = stream,
       .early = turn == FewTurn::second,
       .beside = true},
      FewMaps::of(call, c.tokens, tiles.rows, map), FewTileArguments{FewResult::of(call, space), tiles});
}

/// Whether the product suits a row of the table, which then runs it.
template <typename T, typename Table>
bool run_few_tile(const GemmCall& call, const FewSpace& space, int multiprocessors, FewTurn turn,
                  cudaStream_t stream) {
  const int suited = suited_row<Table>(call.problem, multiprocessors);
  with_row<Table>(
      suited, [&](auto row) { run_few_tile_row<T, Table, row>(call, space, multiprocessors, turn, stream); });
  return suited >= 0;
}

}  // namespace tilewise::cuda::gemm
