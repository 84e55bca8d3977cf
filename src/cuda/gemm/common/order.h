#pragma once

#include <algorithm>

namespace tilewise::cuda::gemm {

/// A tile of the result.
struct TilePlace {
  int m = 0;
  int n = 0;
};

/// In which order tiles are computed. Blocks take every blocks-th of them, so that those at work at a time
/// follow each other: they lie in a band of `band` tiles of rows, columns running along it, and what they
/// read of a and b is about as much of either and stays in the L2.
struct TileOrder {
  int tiles_m = 0;
  int tiles_n = 0;
  int band = 1;

  /// For `blocks` blocks and tiles of that size: what one round reads is least.
  static constexpr TileOrder of(int tiles_m, int tiles_n, int blocks, int rows, int columns) {
    TileOrder order{.tiles_m = tiles_m, .tiles_n = tiles_n};
    long long least = 0;
    for (int band = 1; band <= std::min(tiles_m, blocks); ++band) {
      const int wide = std::max(std::min((blocks + band - 1) / band, tiles_n), 1);
      // A round that is longer than a band goes on in the next.
      const int tall = std::min((blocks + band * wide - 1) / (band * wide) * band, tiles_m);
      const long long read = static_cast<long long>(tall) * rows + static_cast<long long>(wide) * columns;
      // A band no round fills is as good as the next that it does; bands of equal height are better.
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
  constexpr TilePlace place(int index) const {
    const int first = index / (band * tiles_n) * band;
    const int height = std::min(band, tiles_m - first);
    const int inside = index - first * tiles_n;
    return {first + inside % height, inside / height};
  }
};

}  // namespace tilewise::cuda::gemm
