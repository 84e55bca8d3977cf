#pragma once

namespace tilewise::cuda::gemm {

/// How few_tile_kernel distributes weights: a CTA has one tile of `rows` rows with all of K or, with split-K,
/// one of `splits` shares of K, which differ by at most one unit. FewTileConfig says what a unit is.
struct FewTiles {
  int rows = 0;  ///< of weights in a tile
  int tiles = 0;
  int splits = 1;  ///< CTAs of a tile
  int units = 0;   ///< of a tile

  /// CTAs.
  constexpr int blocks() const { return tiles * splits; }
  /// First unit of a split.
  constexpr int begin(int split) const {
    const int longer = units % splits;
    return split * (units / splits) + (split < longer ? split : longer);
  }
  constexpr int count(int split) const { return begin(split + 1) - begin(split); }
};

}  // namespace tilewise::cuda::gemm
