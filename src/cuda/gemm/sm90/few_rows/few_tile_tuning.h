#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "cuda/gemm/sm90/few_rows/few_chain.h"

namespace tilewise::cuda::gemm {

/// What the two consumers of a CTA split between them.
enum class SplitBy {
  k,  ///< K: each has every other unit; at the end they exchange accumulators, and each finishes half of
      ///< the columns
  columns,  ///< the tile: each has half of the columns of every unit
};

/// The shape of a CTA of few_tile_kernel: two consumer warpgroups and a producer warp. Tokens, the rows of A,
/// are wgmma's 64 rows; those past `tokens` are whatever comes next in shared memory. Rows of weights, B, are
/// its columns. A unit is what a stage holds: `panels` panels of 64 of K.
struct FewTileConfig {
  int tokens = 16;  ///< 16, 32 or 64: the rows of A are padded to it
  int rows = 88;    ///< of weights in a stage, a multiple of 8; as many of the gate's, if gated
  int splits = 1;   ///< split-K: CTAs that share the units of a tile
  SplitBy split_by = SplitBy::columns;
  bool gated = false;  ///< a stage has the gate's weights, then those that it gates
  int panels = 1;  ///< of a unit; one copy loads all of them, because the producer is slow to start copies
  int stages = 6;  ///< units of weights in shared memory
  int token_stages = 5;  ///< units of tokens, at most `stages`: tokens come from the L2, weights from memory

  static constexpr int consumers = 2;
  static constexpr int threads = consumers * 128 + 32;

  constexpr bool by_columns() const { return split_by == SplitBy::columns; }
  /// Weight matrices: B, and the gate's if gated.
  constexpr int matrices() const { return gated ? 2 : 1; }
  constexpr int depth() const { return 64 * panels; }
  /// Columns of a consumer's wgmma, at least as many as its rows of weights. Results of further columns are
  /// unused.
  constexpr int columns() const { return by_columns() ? (rows / consumers + 15) / 16 * 16 : rows; }
  /// Columns that both consumers compute for a weight matrix.
  constexpr int all_columns() const { return by_columns() ? consumers * columns() : columns(); }

  constexpr int weight_panel_bytes() const { return rows * 128; }
  constexpr int token_panel_bytes() const { return tokens * 128; }
  constexpr int weight_bytes() const { return panels * matrices() * weight_panel_bytes(); }
  constexpr int token_bytes() const { return panels * token_panel_bytes(); }
  constexpr int ring_bytes() const { return token_stages * token_bytes() + stages * weight_bytes(); }
  /// The mbarriers are behind the stages. Where all_columns() exceeds `rows`, wgmma reads past the last stage
  /// for columns whose results are unused; these reads must stay within shared memory, too.
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(ring_bytes() + std::max(16 * stages, (all_columns() - rows) * 128));
  }
  /// Whether a CTA of the chain's second GEMM fits on an SM beside one of these. Else it starts when this one
  /// has ended.
  constexpr bool leaves_room() const { return shared_bytes() <= shared_beside_late_second; }
  /// Accumulators that a consumer or a CTA hands to another.
  constexpr int partial_floats() const { return columns() * tokens; }

  constexpr bool is_sound() const {
    constexpr std::size_t most = 227 * 1024;
    return (tokens == 16 || tokens == 32 || tokens == 64) && rows % 8 == 0 && all_columns() >= rows &&
           token_stages >= 2 && token_stages <= stages && stages < 256 && shared_bytes() <= most &&
           // K is split, between consumers or CTAs, only without a gate, and between CTAs only where it is
           // split between consumers.
           (by_columns() || !gated) && (splits == 1 || !by_columns()) && splits <= 128 &&
           // A stage always belongs to the same consumer. One that used a stage only every other round could
           // not tell by the mbarrier's parity the round that it waits for from an earlier one.
           (by_columns() || stages % consumers == 0) &&
           // Accumulators that the consumers exchange reuse the stages.
           (by_columns() || partial_floats() * 4 <= ring_bytes()) &&
           // wgmma reads 64 rows of tokens: with fewer, it reads on into the weights.
           (64 - tokens) * 128 <= stages * weight_bytes() &&
           // Partial sums of split-K fit into the CTA's part of FewWorkspace.
           (splits == 1 || partial_floats() <= 128 * tokens);
  }

  friend constexpr bool operator==(const FewTileConfig&, const FewTileConfig&) = default;
};

/// few_tile_choice.h says which row suits a problem. Tuned on an H200 (132 SMs) for a feed-forward network of
/// 4096 and 11008 features: the configurations with 88 rows are for its first GEMM, the others for its
/// second.
struct FewTile {
  static constexpr FewTileConfig rows[] = {
      {.tokens = 16, .rows = 88, .stages = 8, .token_stages = 6},
      {.tokens = 16, .rows = 32, .split_by = SplitBy::k, .panels = 2, .stages = 8, .token_stages = 8},
      {.tokens = 32, .rows = 88, .stages = 7, .token_stages = 6},
      {.tokens = 32, .rows = 32, .split_by = SplitBy::k, .panels = 2, .stages = 8, .token_stages = 5},
      {.tokens = 64, .rows = 88, .stages = 6, .token_stages = 5},
      {.tokens = 64, .rows = 64, .splits = 2, .split_by = SplitBy::k, .stages = 8, .token_stages = 6},
  };
};
struct FewTileGated {
  static constexpr FewTileConfig rows[] = {
      {.tokens = 16, .rows = 88, .gated = true, .stages = 7, .token_stages = 6},
      {.tokens = 32, .rows = 88, .gated = true, .stages = 4, .token_stages = 4},
      {.tokens = 64, .rows = 88, .gated = true, .stages = 7, .token_stages = 6},
  };
};

template <typename Table>
constexpr bool all_sound() {
  return std::all_of(std::begin(Table::rows), std::end(Table::rows),
                     [](const FewTileConfig& c) { return c.is_sound(); });
}
static_assert(all_sound<FewTile>() && all_sound<FewTileGated>());

}  // namespace tilewise::cuda::gemm
