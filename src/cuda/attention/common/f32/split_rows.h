#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "attention/call.h"
#include "core/arena.h"

namespace tilewise::cuda::mma_f32 {

/// Sequences of at most this many keys are left to the fused kernel: with few terms, a result shows the bit
/// that a split number lacks.
inline constexpr std::int64_t few_keys = 64;

/// The exponent of a tile whose numbers do not fit, or whose sequence has few keys.
inline constexpr int unfit_tile = 1 << 20;
/// The exponent, in forward, of a tile in which all numbers are 0. A sum is not rescaled for it.
inline constexpr int zero_tile = 254;

/// Whether the rows of a tensor are queries or keys.
enum class Side { queries, keys };

/// A split tensor, in tiles of consecutive rows of a head and sequence. The parts of a tile follow each
/// other, each laid out as in shared memory.
struct SplitRows {
  Side side = Side::keys;
  int tile_rows = 0;
  int tile_bytes = 0;  ///< all parts
  std::int64_t heads = 0;
  std::int64_t longest = 0;  ///< tiles of the longest sequence
  std::int64_t head_tiles = 0;
  std::byte* data = nullptr;  ///< [heads, head_tiles] tiles
  int* exponents = nullptr;   ///< [heads, head_tiles]
  float* norms = nullptr;     ///< [heads, head_tiles]: the largest norm of a row

  SplitRows() = default;
  SplitRows(Arena& arena, const AttentionCall& call, Side side_, int rows, int parts, int dim)
      : side(side_), tile_rows(rows), tile_bytes(rows * parts * dim * 2) {
    const AttentionProblem& problem = call.problem;
    const bool queries = side == Side::queries;
    heads = queries ? problem.heads_q : problem.heads_kv;
    longest = ((queries ? problem.length_q : problem.length_k) + rows - 1) / rows;
    head_tiles = call.packed() ? (queries ? call.total_q : call.total_k) / rows + problem.batch
                               : problem.batch * longest;
    data = arena.take<std::byte>(heads * head_tiles * tile_bytes);
    exponents = arena.take<int>(heads * head_tiles);
    norms = arena.take<float>(heads * head_tiles);
  }

  /// The first tile of a sequence.
  constexpr std::int64_t first(const AttentionCall& call, std::int64_t b, std::int64_t h) const {
    if (!call.packed()) return h * head_tiles + b * longest;
    return h * head_tiles + (side == Side::queries ? call.first_row_q(b) : call.first_row_k(b)) / tile_rows +
           b;
  }
};

/// Marks of the heads that are left to the fused kernel.
struct Unfit {
  int* queries = nullptr;  ///< [B, Hq]: nonzero where rows of queries do not fit
  int* keys = nullptr;     ///< [B, Hkv]: nonzero where rows of keys do not fit
  int* any = nullptr;      ///< nonzero where some mark is
  std::size_t count = 0;   ///< of all marks, which are contiguous

  Unfit() = default;
  Unfit(Arena& arena, const AttentionCall& call) {
    const std::int64_t of_queries = call.problem.batch * call.problem.heads_q;
    const std::int64_t of_keys = call.problem.batch * call.problem.heads_kv;
    count = static_cast<std::size_t>(of_queries + of_keys + 1);
    queries = arena.take<int>(static_cast<std::int64_t>(count));
    if (queries == nullptr) return;
    keys = queries + of_queries;
    any = keys + of_keys;
  }
};

/// Clears the marks. The kernel that splits comes next and waits for this one.
void clear_marks(const Unfit& unfit, cudaStream_t stream);

/// The workspace of a forward call.
struct ForwardSpace {
  SplitRows k, v;
  Unfit unfit;
  std::size_t bytes = 0;

  ForwardSpace(const AttentionCall& call, void* base, int keys, int parts, int dim) {
    Arena arena(base);
    k = SplitRows(arena, call, Side::keys, keys, parts, dim);
    v = SplitRows(arena, call, Side::keys, keys, parts, dim);
    unfit = Unfit(arena, call);
    bytes = arena.used();
  }
};

}  // namespace tilewise::cuda::mma_f32
