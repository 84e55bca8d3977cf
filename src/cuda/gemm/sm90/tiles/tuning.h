#pragma once

#include <cstddef>
#include <string_view>

namespace tilewise::cuda::gemm {

/// Whether two CTAs form a cluster: for two tiles of the same rows, which share a tile of A, or of the same
/// columns, which share a tile of B. Each CTA loads half of the shared tile and multicasts it to both.
enum class Pair { none, shares_a, shares_b };

/// The shape of a CTA of the wgmma kernel: a producer warp, and `consumers` warpgroups that own row_tiles ·
/// 64 rows of a tile each. There is one CTA on an SM.
struct GemmConfig {
  int consumers = 2;  ///< 2 or 3
  int row_tiles = 1;  ///< 1 or 2
  int columns = 256;  ///< of B in a tile; if gated, half of them are the gate's
  int stages = 4;     ///< of A and B in shared memory, each with `depth` of K
  Pair pair = Pair::none;
  bool gated = false;         ///< the first half of the columns gates the second
  bool transposed_a = false;  ///< A is [K, M] in memory
  bool transposed_b = false;  ///< B is [K, N] in memory
  /// The result is in f32. Tensor cores truncate as they accumulate, with an error that grows with K. So the
  /// accumulators are added to totals in f32 registers every `promotion_interval` stages.
  bool out_f32 = false;
  int promotion_interval = 2;
  float speed = 1;     ///< relative rate of products in the mainloop
  int overhead = 340;  ///< time of a tile's prologue and epilogue that is not hidden, in units of K

  static constexpr int depth = 64;  ///< of K in a stage: 128 bytes, the width of the swizzle

  constexpr int threads() const { return (consumers + 1) * 128; }
  constexpr int consumer_rows() const { return 64 * row_tiles; }
  constexpr int rows() const { return consumers * consumer_rows(); }
  /// Whether as much of a tile's epilogue as possible overlaps with the next tile's main loop (docs/gemm.md).
  /// It made narrow tiles slower: their stages take half as long as those of 256 columns.
  constexpr bool overlaps_epilogue() const { return columns > 128; }
  /// Columns of the result in a tile.
  constexpr int out_columns() const { return gated ? columns / 2 : columns; }
  constexpr int blocks() const { return pair == Pair::none ? 1 : 2; }  ///< CTAs of a cluster
  /// Rows and columns of the result that a cluster computes at a time.
  constexpr int rows_together() const { return pair == Pair::shares_b ? 2 * rows() : rows(); }
  constexpr int columns_together() const { return (pair == Pair::shares_a ? 2 : 1) * out_columns(); }
  /// Rows of a box of A, and of B. Halves of B begin at multiples of 8 rows, so those of 168 columns overlap.
  constexpr int a_box() const { return pair == Pair::shares_a ? rows() / 2 : rows(); }
  constexpr int b_box() const {
    if (gated) return columns / 2;
    return pair == Pair::shares_b ? (columns / 2 + 7) / 8 * 8 : columns;
  }
  constexpr int a_bytes() const { return rows() * depth * 2; }
  constexpr int b_bytes() const { return columns * depth * 2; }
  /// Bytes that TMA copies into a stage. Overlapping halves of B count twice.
  constexpr int loaded_bytes() const {
    const int b_rows = gated || pair == Pair::shares_b ? 2 * b_box() : columns;
    return a_bytes() + b_rows * depth * 2;
  }
  /// Registers of a thread after setmaxnreg. Together they are those that the CTA is launched with.
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 40; }
  constexpr int consumer_registers() const { return consumers == 3 ? 160 : 232; }
  /// Behind the stages are staging slabs of the epilogue: 16 rows of 64 columns, two for each consumer warp.
  constexpr int slab_bytes() const { return 16 * 128; }
  constexpr int tile_bytes() const { return stages * (a_bytes() + b_bytes()); }
  constexpr int slabs_bytes() const { return consumers * 4 * 2 * slab_bytes(); }
  constexpr int barrier_bytes() const { return 16 * stages; }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(tile_bytes() + slabs_bytes() + barrier_bytes());
  }

  template <typename To>
  constexpr void describe(To& to) const {
    to.numbers("consumers row_tiles columns stages", consumers, row_tiles, columns, stages);
    to.word(pair == Pair::none ? "" : pair == Pair::shares_a ? "shares_a" : "shares_b");
  }
  friend constexpr bool operator==(const GemmConfig&, const GemmConfig&) = default;
};

/// There is a table for each layout of A and B. choice.h chooses the row that it expects to take the least
/// time. bench/sweep_gemm.cu measures candidates.
struct Plain {
  static constexpr std::string_view name = "gemm.sm90.plain";
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 256, .stages = 4},
      {.row_tiles = 1, .columns = 256, .stages = 4, .pair = Pair::shares_b, .speed = 1.02f, .overhead = 320},
      {.row_tiles = 1, .columns = 192, .stages = 4, .speed = 0.975f, .overhead = 250},
      {.row_tiles = 1, .columns = 168, .stages = 5, .speed = 0.92f, .overhead = 220},
      {.row_tiles = 2, .columns = 168, .stages = 3, .speed = 1.03f, .overhead = 435},
      {.row_tiles = 1, .columns = 128, .stages = 5, .speed = 0.89f, .overhead = 180},
  };
};
struct Gated {
  static constexpr std::string_view name = "gemm.sm90.gated";
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 256, .stages = 4, .gated = true},
      {.row_tiles = 2, .columns = 128, .stages = 4, .gated = true},
      {.row_tiles = 1, .columns = 224, .stages = 4, .gated = true, .overhead = 300},
      {.row_tiles = 1, .columns = 128, .stages = 5, .gated = true, .speed = 0.89f, .overhead = 180},
  };
};
/// dx = dy · w.
struct TransposedB {
  static constexpr std::string_view name = "gemm.sm90.transposed_b";
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 256, .stages = 4, .pair = Pair::shares_b, .transposed_b = true},
      {.row_tiles = 1,
       .columns = 128,
       .stages = 6,
       .pair = Pair::shares_b,
       .transposed_b = true,
       .speed = 0.89f,
       .overhead = 180},
  };
};
/// dw = dyᵀ · x.
struct TransposedBoth {
  static constexpr std::string_view name = "gemm.sm90.transposed_both";
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1,
       .columns = 256,
       .stages = 4,
       .pair = Pair::shares_b,
       .transposed_a = true,
       .transposed_b = true},
      {.row_tiles = 1,
       .columns = 128,
       .stages = 5,
       .transposed_a = true,
       .transposed_b = true,
       .speed = 0.85f,
       .overhead = 180},
  };
};
struct TransposedA {
  static constexpr std::string_view name = "gemm.sm90.transposed_a";
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 128, .stages = 5, .transposed_a = true},
  };
};
/// Results in f32, by whether A and B are transposed in memory.
template <bool a, bool b>
struct OutF32 {
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 128, .stages = 5, .transposed_a = a, .transposed_b = b, .out_f32 = true},
  };
};
struct OutF32Gated {
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 128, .stages = 5, .gated = true, .out_f32 = true},
  };
};

}  // namespace tilewise::cuda::gemm
