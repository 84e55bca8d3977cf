#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "cuda/gemm/sm90/few_rows/few_chain.h"

namespace tilewise::cuda::gemm {

/// How the two warpgroups of a block share the work.
enum class FewTileParts {
  units,  ///< each has every other unit; at the end they exchange sums, and each finishes half of the columns
  columns,  ///< each has half of the columns of every unit
};

/// How a block of the kernel for few rows by tiles is cut: two warpgroups that multiply, and a warp that
/// loads. Tokens are wgmma's 64 rows, of which those past `tokens` are whatever lies behind in shared memory,
/// and weights its columns. A unit is 64 summands a panel.
struct FewTileConfig {
  int tokens = 16;  ///< 16, 32 or 64: rows of a are filled up to it
  int rows = 88;    ///< places for rows of weights, in eights: of the gate as many, where gated
  int splits = 1;   ///< blocks that share the summands of a tile
  FewTileParts parts = FewTileParts::columns;
  bool gated = false;    ///< the gate's weights, then those that it gates
  int panels = 1;        ///< of a unit, which come by one copy: copies cost the thread that starts them time
  int stages = 6;        ///< units of weights in shared memory
  int token_stages = 5;  ///< units of tokens, which are near: no more than of weights

  static constexpr int consumers = 2;
  static constexpr int threads = consumers * 128 + 32;

  constexpr bool by_columns() const { return parts == FewTileParts::columns; }
  constexpr int factors() const { return gated ? 2 : 1; }
  constexpr int summands() const { return 64 * panels; }
  /// Of a warpgroup's products: no fewer than its rows; what is past them comes to nothing.
  constexpr int columns() const { return by_columns() ? (rows / consumers + 15) / 16 * 16 : rows; }
  /// Of all products of a factor.
  constexpr int all_columns() const { return by_columns() ? consumers * columns() : columns(); }

  constexpr int weight_panel_bytes() const { return rows * 128; }
  constexpr int token_panel_bytes() const { return tokens * 128; }
  constexpr int weight_bytes() const { return panels * factors() * weight_panel_bytes(); }
  constexpr int token_bytes() const { return panels * token_panel_bytes(); }
  constexpr int ring_bytes() const { return token_stages * token_bytes() + stages * weight_bytes(); }
  /// Barriers are behind the ring, where products also read past the last places, of rows that come to
  /// nothing.
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(ring_bytes() + std::max(16 * stages, (all_columns() - rows) * 128));
  }
  /// Whether a block of the product behind has room beside one of these; else it begins when that has ended.
  constexpr bool leaves_room() const { return shared_bytes() <= beside_late_bytes; }
  /// Sums of a block that warpgroups, or blocks, leave to each other.
  constexpr int partial_floats() const { return columns() * tokens; }

  constexpr bool is_sound() const {
    constexpr std::size_t most = 227 * 1024;
    return (tokens == 16 || tokens == 32 || tokens == 64) && rows % 8 == 0 && all_columns() >= rows &&
           token_stages >= 2 && token_stages <= stages && stages < 256 && shared_bytes() <= most &&
           // Units are shared, by warpgroups or by blocks, of products without a gate; splits join last.
           (by_columns() || !gated) && (splits == 1 || !by_columns()) && splits <= 128 &&
           // A place is always the same warpgroup's: one that comes to a place every other round cannot tell
           // by a barrier's parity the round it waits for from the one before the last.
           (by_columns() || stages % consumers == 0) &&
           // Sums on their way from one warpgroup to the other take the places of weights and tokens.
           (by_columns() || partial_floats() * 4 <= ring_bytes()) &&
           // Of 16 tokens a product reads 64 rows, on into the weights.
           (64 - tokens) * 128 <= stages * weight_bytes() &&
           // What blocks leave to others has its place in FewSpace.
           (splits == 1 || partial_floats() <= 128 * tokens);
  }

  friend constexpr bool operator==(const FewTileConfig&, const FewTileConfig&) = default;
};

/// One of those for so many tokens, where one suits (few_tile_choice.h). Tuned on a network of 4096 and 11008
/// and an H200, 132 multiprocessors: those of 88 rows are for its first product, the others for its second.
struct FewTile {
  static constexpr FewTileConfig rows[] = {
      {.tokens = 16, .rows = 88, .stages = 8, .token_stages = 6},
      {.tokens = 16, .rows = 32, .parts = FewTileParts::units, .panels = 2, .stages = 8, .token_stages = 8},
      {.tokens = 32, .rows = 88, .stages = 7, .token_stages = 6},
      {.tokens = 32, .rows = 32, .parts = FewTileParts::units, .panels = 2, .stages = 8, .token_stages = 5},
      {.tokens = 64, .rows = 88, .stages = 6, .token_stages = 5},
      {.tokens = 64, .rows = 64, .splits = 2, .parts = FewTileParts::units, .stages = 8, .token_stages = 6},
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
