#pragma once

#include <algorithm>

#include "cuda/gemm/sm90/few_rows/few.cuh"
#include "cuda/gemm/sm90/few_rows/few_tile.cuh"
#include "cuda/gemm/sm90/few_rows/few_tile_choice.h"
#include "cuda/gemm/sm90/few_rows/stream.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tensor_map.h"

namespace tilewise::cuda::gemm {

// From a product to the kernels for few rows: of one by a stream, of more by tiles or by equal shares.

template <typename T, typename Table, int row>
void run_few_tile_row(const GemmCall& call, const FewSpace& space, int multiprocessors, InChain place,
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
       .shared_bytes = place == InChain::second ? std::max(c.shared_bytes(), late_bytes) : c.shared_bytes(),
       .stream = stream,
       .early = place == InChain::second,
       .beside = true},
      FewMaps::of(call, c.tokens, tiles.rows, map), FewTileArguments{FewResult::of(call, space), tiles});
}

/// Whether the product suits a row of the table, which then runs it.
template <typename T, typename Table>
bool run_few_tile(const GemmCall& call, const FewSpace& space, int multiprocessors, InChain place,
                  cudaStream_t stream) {
  const int suited = suited_row<Table>(call.problem, multiprocessors);
  with_row<Table>(suited, [&](auto row) {
    run_few_tile_row<T, Table, row>(call, space, multiprocessors, place, stream);
  });
  return suited >= 0;
}

template <typename T, typename Table, int row>
void run_few_row(const GemmCall& call, const FewSpace& space, int multiprocessors, InChain place,
                 cudaStream_t stream) {
  constexpr FewConfig c = Table::rows[row];
  const GemmProblem& problem = call.problem;
  const auto map = [&](const Matrix& factor, int box) {
    return map_of_matrix(factor.data, factor.dtype, factor.rows, factor.columns, factor.stride_row, box);
  };
  FewShare share{.row_blocks = static_cast<int>((problem.n + c.columns() - 1) / c.columns()),
                 .depth_blocks = static_cast<int>((problem.k + c.depth - 1) / c.depth)};
  share.blocks = std::min(multiprocessors, share.total());
  // Of one row the first may be a stream, which leaves less room.
  const bool late = place == InChain::second && problem.m > 1;
  launch<few_kernel<T, Table, row>>({.name = "tilewise gemm of few rows",
                                     .blocks = share.blocks,
                                     .threads = c.threads,
                                     .shared_bytes = late ? late_bytes : c.shared_bytes(),
                                     .stream = stream,
                                     .early = place == InChain::second,
                                     .beside = late},
                                    FewMaps::of(call, c.tokens, c.columns(), map),
                                    FewArguments{FewResult::of(call, space), share});
}

template <typename T, typename Table>
void run_few_suited(const GemmCall& call, const FewSpace& space, int multiprocessors, InChain place,
                    cudaStream_t stream) {
  const int suited = first_row<Table>([&](const FewConfig& c) { return call.problem.m <= c.tokens; });
  with_row<Table>(suited,
                  [&](auto row) { run_few_row<T, Table, row>(call, space, multiprocessors, place, stream); });
}

template <typename T>
void run_few(const GemmCall& call, const Context& context, InChain place) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  if (suits_stream(call, multiprocessors)) return run_stream<T>(call, multiprocessors, place, stream);
  Arena arena(context.workspace.data);
  const FewSpace space = take_few_space(arena, call.problem.m, multiprocessors);
  const bool done = call.problem.gated
                        ? run_few_tile<T, FewTileGated>(call, space, multiprocessors, place, stream)
                        : run_few_tile<T, FewTile>(call, space, multiprocessors, place, stream);
  if (done) return;
  call.problem.gated ? run_few_suited<T, FewGated>(call, space, multiprocessors, place, stream)
                     : run_few_suited<T, Few>(call, space, multiprocessors, place, stream);
}

}  // namespace tilewise::cuda::gemm
