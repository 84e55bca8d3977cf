#pragma once

namespace tilewise::cuda::gemm {

/// How weights are shared out by tiles: a block has some rows and all of their summands, or one of a few
/// equal shares of them, which differ by one unit at the most. A unit is some summands of a tile's rows.
struct FewTiles {
  int rows = 0;  ///< of a tile
  int tiles = 0;
  int splits = 1;  ///< blocks of a tile
  int units = 0;   ///< of a row

  constexpr int blocks() const { return tiles * splits; }
  constexpr int begin(int split) const {
    const int longer = units % splits;
    return split * (units / splits) + (split < longer ? split : longer);
  }
  constexpr int count(int split) const { return begin(split + 1) - begin(split); }
};

}  // namespace tilewise::cuda::gemm
