#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "attention/call.h"
#include "core/arena.h"

namespace tilewise::cuda::mma_f32 {

/// Sequences of fewer keys than this are left to the fused kernel: where a few terms are all of a result, the
/// bit that a number's parts lack would show.
inline constexpr std::int64_t few_keys = 64;

/// Heads that are left to the fused kernel.
struct Unfit {
  int* queries = nullptr;  ///< [B, Hq]: nonzero where numbers of q do not fit
  int* keys = nullptr;     ///< [B, Hkv]: the same of k and v
};

/// Keys and values of every head in tiles, split: a tile's parts lie one after another, each as it will lie
/// in shared memory.
struct SplitTiles {
  int keys = 0;         ///< a tile
  int tile_bytes = 0;   ///< all parts
  std::int64_t head_tiles = 0;
  std::byte* k = nullptr;  ///< [Hkv, head_tiles] tiles
  std::byte* v = nullptr;
  int* k_exponents = nullptr;  ///< [Hkv, head_tiles]
  int* v_exponents = nullptr;

  /// Tiles of the longest sequence.
  constexpr std::int64_t longest(const AttentionCall& call) const {
    return (call.problem.length_k + keys - 1) / keys;
  }
  /// The first tile of a sequence.
  constexpr std::int64_t first(const AttentionCall& call, std::int64_t b, std::int64_t h) const {
    return h * head_tiles + (call.packed() ? call.first_row_k(b) / keys + b : b * longest(call));
  }
};

/// The workspace of a forward call.
struct ForwardSpace {
  SplitTiles tiles;
  Unfit unfit;
  std::size_t bytes = 0;
  std::size_t unfit_count = 0;  ///< of both, which lie together

  ForwardSpace(const AttentionCall& call, void* base, int keys, int parts, int dim) {
    const AttentionProblem& problem = call.problem;
    Arena arena(base);
    tiles.keys = keys;
    tiles.tile_bytes = keys * parts * dim * 2;
    tiles.head_tiles =
        call.packed() ? call.total_k / keys + problem.batch : problem.batch * tiles.longest(call);
    const std::int64_t count = problem.heads_kv * tiles.head_tiles;
    tiles.k = arena.take<std::byte>(count * tiles.tile_bytes);
    tiles.v = arena.take<std::byte>(count * tiles.tile_bytes);
    tiles.k_exponents = arena.take<int>(count);
    tiles.v_exponents = arena.take<int>(count);
    unfit_count = static_cast<std::size_t>(problem.batch * (problem.heads_q + problem.heads_kv));
    unfit.queries = arena.take<int>(static_cast<std::int64_t>(unfit_count));
    unfit.keys = unfit.queries == nullptr ? nullptr : unfit.queries + problem.batch * problem.heads_q;
    bytes = arena.used();
  }
};

}  // namespace tilewise::cuda::mma_f32
