#pragma once

#include <cuda.h>
#include <cstdint>

#include "core/arena.h"
#include "cuda/gemm/sm90/arguments.h"
#include "cuda/runtime/owner.h"

namespace tilewise::cuda::gemm {

// Arguments of the kernels for few rows, by tiles (few_tile.cuh) and by stream-K (few.cuh).

/// Where CTAs that share a tile's K hand partial sums to each other.
struct FewWorkspace {
  float* partials;       ///< [multiprocessors][128 · tokens]
  std::uint32_t* flags;  ///< [multiprocessors][2], one for each consumer
};

/// For `rows` tokens, padded to a power of two.
inline FewWorkspace take_few_workspace(Arena& arena, std::int64_t rows, int multiprocessors) {
  std::int64_t tokens = 8;
  while (tokens < rows) tokens *= 2;
  return {arena.take<float>(multiprocessors * 128 * tokens),
          arena.take<std::uint32_t>(std::int64_t{multiprocessors} * 2)};
}

/// Tensor maps of A (tokens), B (weights) and the gate's weights.
struct FewMaps {
  CUtensorMap a, b, gate;

  /// `map(operand, rows)` makes a map with boxes of `rows` rows: `tokens` of A, `weights` of the others.
  template <typename Map>
  static FewMaps of(const GemmCall& call, int tokens, int weights, const Map& map) {
    FewMaps maps{.a = map(call.a, tokens), .b = map(call.b, weights)};
    maps.gate = call.problem.gated ? map(call.gate, weights) : maps.b;
    return maps;
  }
};

/// What happens to the accumulators: the epilogue, or a reduction over CTAs before it.
struct FewOutput {
  int m = 0, n = 0;
  Epilogue epilogue;
  float* partials = nullptr;       ///< [CTAs][partial_floats]
  std::uint32_t* flags = nullptr;  ///< [CTAs][consumers]: equal to `owner` when partials are complete
  std::uint32_t owner = 0;         ///< a word that no other launch has

  static FewOutput of(const GemmCall& call, const FewWorkspace& workspace) {
    return {.m = static_cast<int>(call.problem.m),
            .n = static_cast<int>(call.problem.n),
            .epilogue = Epilogue::of(call),
            .partials = workspace.partials,
            .flags = workspace.flags,
            .owner = new_owner()};
  }
};

}  // namespace tilewise::cuda::gemm
