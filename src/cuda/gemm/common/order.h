#pragma once

#include <algorithm>

namespace tilewise::cuda::gemm {

/// The place of a tile in the result, counted in tiles.
struct TilePlace {
  int m = 0;
  int n = 0;
};

/// In which order tiles are computed (L2 swizzle). The tiles that are computed at the same time have
/// consecutive numbers. They are in a band of `band` tiles along M and are numbered along the band, column by
/// column:
///
///   band 0   0  2  4  6      (band = 2, tiles_n = 4)
///            1  3  5  7
///   band 1   8 10 12 14
///            9 11 13 15
///
/// So they read about as much of A as of B, and both stay in the L2.
struct TileOrder {
  int tiles_m = 0;
  int tiles_n = 0;
  int band = 1;

  /// The order in which a round of `blocks` tiles reads least. Tiles are rows x columns elements.
  static constexpr TileOrder of(int tiles_m, int tiles_n, int blocks, int rows, int columns) {
    TileOrder order{.tiles_m = tiles_m, .tiles_n = tiles_n};
    long long least = 0;
    for (int band = 1; band <= std::min(tiles_m, blocks); ++band) {
      const int wide = std::max(std::min((blocks + band - 1) / band, tiles_n), 1);
      // A round that is longer than a band continues in the next one.
      const int tall = std::min((blocks + band * wide - 1) / (band * wide) * band, tiles_m);
      const long long read = static_cast<long long>(tall) * rows + static_cast<long long>(wide) * columns;
      // Rounds that do not fill a band, and the last band, count as if they were full. The latter favours
      // bands of equal height.
      const int bands = (tiles_m + band - 1) / band;
      const long long cost = read * bands * band;
      if (least == 0 || cost < least) {
        least = cost;
        order.band = band;
      }
    }
    return order;
  }

  constexpr int total() const { return tiles_m * tiles_n; }
  /// The place of tile `index` of the order.
  constexpr TilePlace place(int index) const {
    const int first = index / (band * tiles_n) * band;
    const int height = std::min(band, tiles_m - first);
    const int inside = index - first * tiles_n;
    return {first + inside % height, inside / height};
  }
};

}  // namespace tilewise::cuda::gemm
