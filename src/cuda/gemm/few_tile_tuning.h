#pragma once

#include <cstddef>

namespace tilewise::cuda::gemm {

/// How the two warpgroups of a block share the work.
enum class FewTileParts {
  units,  ///< each has every other unit; at the end they exchange sums, and each finishes half of the columns
  columns,  ///< each has half of the columns of every unit
};

/// How a block of the kernel for few rows by tiles is cut: two warpgroups that multiply, and a warp that
/// loads. Tokens are wgmma's 64 rows, of which those past `tokens` are whatever lies behind in shared memory,
/// and weights its columns.
struct FewTileConfig {
  int tokens = 16;  ///< 16, 32 or 64: rows of a are filled up to it
  int rows = 128;   ///< places for rows of weights, in eights: of the gate as many, where gated
  FewTileParts parts = FewTileParts::columns;
  int columns =
      64;  ///< of a warpgroup's products: no fewer than its rows; what is past them comes to nothing
  bool gated = false;  ///< the gate's weights, then those that it gates
  int panels = 1;      ///< of 64 summands, a unit
  bool slabs =
      false;       ///< one copy has a unit's panels, of all places for rows: copies cost their thread time
  int stages = 5;  ///< units of weights in shared memory
  int token_stages = 3;  ///< units of tokens, which are near: no more than of weights
  bool runs = false;     ///< weights come to the L2 before they are loaded, in long pieces of rows (FewRuns)
  int blocks = 2;        ///< that a multiprocessor has room for: with one, the next kernel's come after it

  static constexpr int consumers = 2;
  static constexpr int threads = consumers * 128 + 32;

  constexpr bool by_columns() const { return parts == FewTileParts::columns; }
  constexpr int factors() const { return gated ? 2 : 1; }
  constexpr int summands() const { return 64 * panels; }
  /// From one panel of a factor's weights to the next, and from the gate's to what it gates.
  constexpr int weight_panel_bytes() const { return (slabs ? 1 : factors()) * rows * 128; }
  constexpr int factor_bytes() const { return (slabs ? panels : 1) * rows * 128; }
  constexpr int token_panel_bytes() const { return tokens * 128; }
  constexpr int weight_bytes() const { return panels * factors() * rows * 128; }
  constexpr int token_bytes() const { return panels * token_panel_bytes(); }
  constexpr int ring_bytes() const { return token_stages * token_bytes() + stages * weight_bytes(); }
  /// Columns of all products of a factor.
  constexpr int all_columns() const { return by_columns() ? consumers * columns : columns; }
  /// What products read past the last places, of rows that come to nothing.
  constexpr int rest_bytes() const { return (all_columns() - rows) * 128; }
  constexpr std::size_t shared_bytes() const {
    const int barriers = 16 * stages + 8;
    return static_cast<std::size_t>(ring_bytes() + (barriers > rest_bytes() ? barriers : rest_bytes()));
  }
  /// Sums of a block's that another finishes.
  constexpr int partial_floats() const { return factors() * all_columns() * tokens; }

  constexpr bool is_sound() const {
    return (tokens == 16 || tokens == 32 || tokens == 64) && rows % 8 == 0 && all_columns() >= rows &&
           panels >= 1 && token_stages >= 2 && token_stages <= stages && stages < 256 &&
           // A place is always the same warpgroup's: one that comes to a place every other round cannot tell
           // by a barrier's parity the round it waits for from the one before the last.
           (by_columns() || stages % consumers == 0) &&
           // Sums on their way from one warpgroup to the other take the places of weights and tokens.
           (by_columns() || partial_floats() * 4 <= ring_bytes()) &&
           // Of 16 tokens a product reads 64 rows, on into the weights.
           (64 - tokens) * 128 <= stages * weight_bytes() &&
           static_cast<std::size_t>(blocks) * (shared_bytes() + 1024) <= 233472;
  }

  friend constexpr bool operator==(const FewTileConfig&, const FewTileConfig&) = default;
};

}  // namespace tilewise::cuda::gemm
