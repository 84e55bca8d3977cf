#pragma once

namespace tilewise::cuda::gemm {

/// How weights are shared out by tiles: a block has some rows and all of their summands, or one of a few
/// equal shares of them, which differ by one unit at the most. A unit is some summands of a tile's rows.
/// Blocks of different tiles begin at different units, so that not all of them read the same tokens at a
/// time, and come round to those before. All that takes a division is done once, by the host.
struct FewTiles {
  int rows = 0;  ///< of a tile
  int tiles = 0;
  int splits = 1;    ///< blocks of a tile
  int units = 0;     ///< of a row
  int summands = 0;  ///< of a unit
  int share = 0;     ///< units of a block, or one less
  int longer = 0;    ///< splits that have one more
  int turn = 0;      ///< units, times 2^16, from where a tile's block begins to where the next tile's does

  static constexpr FewTiles of(int rows, int tiles, int splits, int units, int summands) {
    const int share = units / splits;
    const int turn = share < (1 << 15) ? (share << 16) / tiles : 0;
    return {rows, tiles, splits, units, summands, share, units % splits, turn};
  }

  constexpr int blocks() const { return tiles * splits; }
  constexpr int begin(int split) const { return split * share + (split < longer ? split : longer); }
  constexpr int count(int split) const { return share + (split < longer ? 1 : 0); }
  /// Which of its units a block begins with.
  constexpr int turned(int tile) const {
    return static_cast<int>(static_cast<unsigned>(tile) * static_cast<unsigned>(turn) >> 16);
  }
};

}  // namespace tilewise::cuda::gemm
