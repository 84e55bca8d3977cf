#pragma once

#include <cuda.h>
#include <cstdint>

#include "core/arena.h"
#include "cuda/gemm/sm90/arguments.h"
#include "cuda/runtime/owner.h"

namespace tilewise::cuda::gemm {

// What the kernels for few rows are given, by tiles or by equal shares.

/// What blocks of a product with few rows leave to each other.
struct FewSpace {
  float* partials;       ///< [multiprocessors][128 x tokens]
  std::uint32_t* flags;  ///< [multiprocessors][2]: of each warpgroup
};

/// Tokens are filled up to a power of two.
inline FewSpace take_few_space(Arena& arena, std::int64_t rows, int multiprocessors) {
  std::int64_t tokens = 8;
  while (tokens < rows) tokens *= 2;
  return {arena.take<float>(multiprocessors * 128 * tokens),
          arena.take<std::uint32_t>(std::int64_t{multiprocessors} * 2)};
}

/// Tokens, weights and the gate's weights.
struct FewMaps {
  CUtensorMap a, b, gate;

  /// `map` makes one of a factor, for boxes of so many of its rows.
  template <typename Map>
  static FewMaps of(const GemmCall& call, int tokens, int weights, const Map& map) {
    FewMaps maps{.a = map(call.a, tokens), .b = map(call.b, weights)};
    maps.gate = call.problem.gated ? map(call.gate, weights) : maps.b;
    return maps;
  }
};

/// What becomes of sums.
struct FewResult {
  int m = 0, n = 0;
  Epilogue epilogue;
  float* partials = nullptr;       ///< [blocks][partial_floats], where blocks share sums
  std::uint32_t* flags = nullptr;  ///< [blocks][consumers]: a block's partial is there
  std::uint32_t owner = 0;         ///< the word that says so, which no other launch has

  static FewResult of(const GemmCall& call, const FewSpace& space) {
    return {.m = static_cast<int>(call.problem.m),
            .n = static_cast<int>(call.problem.n),
            .epilogue = Epilogue::of(call),
            .partials = space.partials,
            .flags = space.flags,
            .owner = new_owner()};
  }
};

}  // namespace tilewise::cuda::gemm
