#pragma once

#include <cstddef>

namespace tilewise::cuda::gemm {

/// Whether two blocks work side by side (a cluster): on two tiles of the same rows, which share what is read
/// of a, or of the same columns, which share b. Each loads half of that, into both.
enum class Pair { none, shares_a, shares_b };

/// How a block of the wgmma kernel is cut: a warp that loads, and `consumers`, warpgroups that have row_tiles
/// times 64 rows each of a tile. It is alone on its multiprocessor.
struct GemmConfig {
  int consumers = 2;  ///< 2 or 3
  int row_tiles = 1;  ///< 1 or 2
  int columns = 256;  ///< a tile, of b; where gated, half of them are the gate's
  int stages = 4;     ///< tiles of a and b in shared memory, each of 64 summands
  Pair pair = Pair::none;
  bool gated = false;     ///< the first half of the columns gates the second
  bool turned_a = false;  ///< a is [k, m] in memory
  bool turned_b = false;  ///< b is [k, n] in memory
  /// The result is in f32. Tensor cores truncate their sums, an error that grows with their length: sums are
  /// taken out of them every `piece` stages and added up in f32.
  bool wide = false;
  int piece = 2;
  float speed = 1;  ///< products, with the multiprocessor busy
  int rest = 340;   ///< what is not hidden of a tile's beginning and end, in summands

  static constexpr int depth = 64;  ///< summands a stage: a panel of 128 bytes

  constexpr int threads() const { return (consumers + 1) * 128; }
  constexpr int consumer_rows() const { return 64 * row_tiles; }
  constexpr int rows() const { return consumers * consumer_rows(); }
  /// Whether as much of a tile's end as can be is done under the next one's products (docs/gemm.md). Narrow
  /// tiles lost by it: a stage of theirs takes half as long as one of 256 columns.
  constexpr bool hides_end() const { return columns > 128; }
  /// Of the result.
  constexpr int out_columns() const { return gated ? columns / 2 : columns; }
  constexpr int blocks() const { return pair == Pair::none ? 1 : 2; }  ///< that work together
  /// What they have of the result.
  constexpr int rows_together() const { return pair == Pair::shares_b ? 2 * rows() : rows(); }
  constexpr int columns_together() const { return (pair == Pair::shares_a ? 2 : 1) * out_columns(); }
  /// Rows of a box of a, and of b. Halves of b begin at multiples of 8 rows: those of 168 overlap.
  constexpr int a_box() const { return pair == Pair::shares_a ? rows() / 2 : rows(); }
  constexpr int b_box() const {
    if (gated) return columns / 2;
    return pair == Pair::shares_b ? (columns / 2 + 7) / 8 * 8 : columns;
  }
  constexpr int a_bytes() const { return rows() * depth * 2; }
  constexpr int b_bytes() const { return columns * depth * 2; }
  /// What comes into a stage.
  constexpr int loaded_bytes() const {
    const int b_rows = gated || pair == Pair::shares_b ? 2 * b_box() : columns;
    return a_bytes() + b_rows * depth * 2;
  }
  /// Registers of a thread; together they are what a block of one a multiprocessor starts with.
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 40; }
  constexpr int consumer_registers() const { return consumers == 3 ? 160 : 232; }
  /// Slabs of the result on their way out, 16 rows of 64 columns, two a warp, stand behind the tiles.
  constexpr int slab_bytes() const { return 16 * 128; }
  constexpr int tile_bytes() const { return stages * (a_bytes() + b_bytes()); }
  constexpr int slabs_bytes() const { return consumers * 4 * 2 * slab_bytes(); }
  constexpr int barrier_bytes() const { return 16 * stages; }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(tile_bytes() + slabs_bytes() + barrier_bytes());
  }

  friend constexpr bool operator==(const GemmConfig&, const GemmConfig&) = default;
};

/// One row a line, by how factors lie in memory. The one is taken whose tiles take the least time on all
/// multiprocessors. bench/sweep_gemm.cu measures candidates.
struct Plain {
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 256, .stages = 4},
      {.row_tiles = 1, .columns = 256, .stages = 4, .pair = Pair::shares_b, .speed = 1.02f, .rest = 320},
      {.row_tiles = 1, .columns = 192, .stages = 4, .speed = 0.975f, .rest = 250},
      {.row_tiles = 1, .columns = 168, .stages = 5, .speed = 0.92f, .rest = 220},
      {.row_tiles = 2, .columns = 168, .stages = 3, .speed = 1.03f, .rest = 435},
      {.row_tiles = 1, .columns = 128, .stages = 5, .speed = 0.89f, .rest = 180},
  };
};
struct Gated {
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 256, .stages = 4, .gated = true},
      {.row_tiles = 2, .columns = 128, .stages = 4, .gated = true},
      {.row_tiles = 1, .columns = 224, .stages = 4, .gated = true, .rest = 300},
      {.row_tiles = 1, .columns = 128, .stages = 5, .gated = true, .speed = 0.89f, .rest = 180},
  };
};
/// dx = dy · w.
struct TurnedB {
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 256, .stages = 4, .pair = Pair::shares_b, .turned_b = true},
      {.row_tiles = 1,
       .columns = 128,
       .stages = 6,
       .pair = Pair::shares_b,
       .turned_b = true,
       .speed = 0.89f,
       .rest = 180},
  };
};
/// dw = dyᵀ · x.
struct TurnedBoth {
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1,
       .columns = 256,
       .stages = 4,
       .pair = Pair::shares_b,
       .turned_a = true,
       .turned_b = true},
      {.row_tiles = 1,
       .columns = 128,
       .stages = 5,
       .turned_a = true,
       .turned_b = true,
       .speed = 0.85f,
       .rest = 180},
  };
};
struct TurnedA {
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 128, .stages = 5, .turned_a = true},
  };
};
/// Results in f32, by whether a, and whether b is turned.
template <bool a, bool b>
struct Wide {
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 128, .stages = 5, .turned_a = a, .turned_b = b, .wide = true},
  };
};
struct WideGated {
  static constexpr GemmConfig rows[] = {
      {.row_tiles = 1, .columns = 128, .stages = 5, .gated = true, .wide = true},
  };
};

}  // namespace tilewise::cuda::gemm
