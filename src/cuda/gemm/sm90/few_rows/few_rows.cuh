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

// From a call to one of the three kernels for few rows: the stream for one row of A, else tiles where a row
// of their tables suits, else stream-K.

template <typename T, typename Table, int row>
void run_few_tile_row(const GemmCall& call, const FewWorkspace& workspace, int multiprocessors, InChain place,
                      cudaStream_t stream) {
  constexpr FewTileConfig c = Table::rows[row];
  const FewTiles tiles = tiles_of(call.problem, c, multiprocessors);
  const auto map = [&](const Matrix& operand, int box) {
    return c.panels > 1 ? map_of_panels(operand.data, operand.dtype, operand.rows, operand.columns,
                                        operand.stride_row, box, c.panels)
                        : map_of_matrix(operand.data, operand.dtype, operand.rows, operand.columns,
                                        operand.stride_row, box);
  };
  launch<few_tile_kernel<T, Table, row>>(
      {.name = "tilewise few_rows gemm, tiles",
       .blocks = tiles.tiles,
       .threads = c.threads,
       .layers = tiles.splits,
       .shared_bytes =
           place == InChain::second ? std::max(c.shared_bytes(), shared_of_late_second) : c.shared_bytes(),
       .stream = stream,
       .early = place == InChain::second,
       .beside = true},
      FewMaps::of(call, c.tokens, tiles.rows, map), FewTileArguments{FewOutput::of(call, workspace), tiles});
}

/// Runs the row of the table that suits the problem. Returns false if there is none.
template <typename T, typename Table>
bool run_few_tile(const GemmCall& call, const FewWorkspace& workspace, int multiprocessors, InChain place,
                  cudaStream_t stream) {
  const int suited = suited_row<Table>(call.problem, multiprocessors);
  with_row<Table>(suited, [&](auto row) {
    run_few_tile_row<T, Table, row>(call, workspace, multiprocessors, place, stream);
  });
  return suited >= 0;
}

template <typename T, typename Table, int row>
void run_few_stream_k_row(const GemmCall& call, const FewWorkspace& workspace, int multiprocessors,
                          InChain place, cudaStream_t stream) {
  constexpr FewConfig c = Table::rows[row];
  const GemmProblem& problem = call.problem;
  const auto map = [&](const Matrix& operand, int box) {
    return map_of_matrix(operand.data, operand.dtype, operand.rows, operand.columns, operand.stride_row, box);
  };
  StreamKSchedule schedule{.tiles = static_cast<int>((problem.n + c.columns() - 1) / c.columns()),
                           .units_per_tile = static_cast<int>((problem.k + c.depth - 1) / c.depth)};
  schedule.blocks = std::min(multiprocessors, schedule.total());
  // With one token the first GEMM of the chain may be stream_kernel, which leaves less room beside it.
  const bool late = place == InChain::second && problem.m > 1;
  launch<few_kernel<T, Table, row>>({.name = "tilewise few_rows gemm, stream-K",
                                     .blocks = schedule.blocks,
                                     .threads = c.threads,
                                     .shared_bytes = late ? shared_of_late_second : c.shared_bytes(),
                                     .stream = stream,
                                     .early = place == InChain::second,
                                     .beside = late},
                                    FewMaps::of(call, c.tokens, c.columns(), map),
                                    FewArguments{FewOutput::of(call, workspace), schedule});
}

template <typename T, typename Table>
void run_few_stream_k(const GemmCall& call, const FewWorkspace& workspace, int multiprocessors, InChain place,
                      cudaStream_t stream) {
  const int suited = first_row<Table>([&](const FewConfig& c) { return call.problem.m <= c.tokens; });
  with_row<Table>(suited, [&](auto row) {
    run_few_stream_k_row<T, Table, row>(call, workspace, multiprocessors, place, stream);
  });
}

template <typename T>
void run_few(const GemmCall& call, const Context& context, InChain place) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  if (suits_stream(call, multiprocessors)) return run_stream<T>(call, multiprocessors, place, stream);
  Arena arena(context.workspace.data);
  const FewWorkspace workspace = take_few_workspace(arena, call.problem.m, multiprocessors);
  const bool done = call.problem.gated
                        ? run_few_tile<T, FewTileGated>(call, workspace, multiprocessors, place, stream)
                        : run_few_tile<T, FewTile>(call, workspace, multiprocessors, place, stream);
  if (done) return;
  call.problem.gated ? run_few_stream_k<T, FewGated>(call, workspace, multiprocessors, place, stream)
                     : run_few_stream_k<T, Few>(call, workspace, multiprocessors, place, stream);
}

}  // namespace tilewise::cuda::gemm
