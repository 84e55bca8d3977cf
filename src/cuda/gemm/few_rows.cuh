#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/arena.h"
#include "cuda/gemm/few.cuh"
#include "cuda/gemm/stream.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/owner.h"
#include "cuda/tile/tensor_map.h"

namespace tilewise::cuda::gemm {

// From a product to the kernel for few rows.

struct FewSpace {
  float* partials;
  std::uint32_t* flags;
};
inline FewSpace take_few_space(Arena& arena, std::int64_t rows, int multiprocessors) {
  std::int64_t tokens = 8;
  while (tokens < rows) tokens *= 2;
  return {arena.take<float>(multiprocessors * 128 * tokens),
          arena.take<std::uint32_t>(std::int64_t{multiprocessors} * FewConfig::consumers)};
}

/// Shared memory of a block that needs so much.
inline std::size_t few_bytes(std::size_t needed, FewTurn turn, const FewOverlap& overlap) {
  return turn == FewTurn::second && overlap.late ? std::max(needed, late_bytes) : needed;
}

inline FewShare share_of(const GemmProblem& problem, const FewConfig& c, int multiprocessors) {
  FewShare share{.row_blocks = static_cast<int>((problem.n + c.columns() - 1) / c.columns()),
                 .depth_blocks = static_cast<int>((problem.k + c.depth - 1) / c.depth)};
  share.blocks = std::min(multiprocessors, share.total());
  return share;
}

/// A product's weights for who brings them to the L2.
inline FewWeights weights_of(const Matrix& b, const FewTiles& tiles, const FewShare& share, int held) {
  return {.map = map_of_runs(b.data, b.dtype, b.rows, b.columns, b.stride_row, 32, 1),
          .tiles = tiles,
          .share = share,
          .held = held};
}

template <typename T, typename Table, int row>
void run_few_row(const GemmCall& call, const FewSpace& space, int multiprocessors, FewTurn turn,
                 cudaStream_t stream, const FewOverlap& overlap = {}) {
  constexpr FewConfig c = Table::rows[row];
  const GemmProblem& problem = call.problem;
  const auto map = [&](const Matrix& factor, int box) {
    return map_of_matrix(factor.data, factor.dtype, factor.rows, factor.columns, factor.stride_row, box);
  };
  FewMaps maps{.a = map(call.a, c.tokens), .b = map(call.b, c.columns())};
  maps.gate = c.gated ? map(call.gate, c.columns()) : maps.b;
  const FewShare share = share_of(problem, c, multiprocessors);
  const FewArguments arguments{.share = share,
                               .m = static_cast<int>(problem.m),
                               .n = static_cast<int>(problem.n),
                               .epilogue = Epilogue::of(call),
                               .partials = space.partials,
                               .flags = space.flags,
                               .owner = new_owner()};
  const Launch how{.name = "tilewise gemm of few rows",
                   .blocks = share.blocks,
                   .threads = c.threads,
                   .shared_bytes = few_bytes(c.shared_bytes(), turn, overlap),
                   .stream = stream,
                   .early = turn == FewTurn::second};
  if constexpr (c.overlaps) {
    launch<few_overlap_kernel<T, Table, row>>(how, maps, arguments, overlap);
  } else {
    launch<few_kernel<T, Table, row>>(how, maps, arguments);
  }
}

template <typename T, typename Table>
void run_few_suited(const GemmCall& call, const FewSpace& space, int multiprocessors, FewTurn turn,
                    cudaStream_t stream) {
  bool done = false;
  [&]<int... row>(std::integer_sequence<int, row...>) {
    ((!done && call.problem.m <= Table::rows[row].tokens
          ? (done = true, run_few_row<T, Table, row>(call, space, multiprocessors, turn, stream))
          : void()),
     ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(Table::rows))>{});
}

template <typename T>
void run_few(const GemmCall& call, const Context& context, FewTurn turn) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  if (suits_stream(call, multiprocessors)) return run_stream<T>(call, multiprocessors, turn, stream);
  Arena arena(context.workspace.data);
  const FewSpace space = take_few_space(arena, call.problem.m, multiprocessors);
  call.problem.gated ? run_few_suited<T, FewGated>(call, space, multiprocessors, turn, stream)
                     : run_few_suited<T, Few>(call, space, multiprocessors, turn, stream);
}

}  // namespace tilewise::cuda::gemm
