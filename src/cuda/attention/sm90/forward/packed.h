#pragma once

#include <algorithm>

#include "cuda/attention/sm90/forward/arguments.h"

namespace tilewise::cuda::wgmma {

// Which rows of packed sequences a number of a tile stands for (packed_tiles in schedule.h). Cumulative
// lengths are brought inside the tensors, whatever they are, and the first sequence begins at 0. Each row of
// queries is some number's then: the larger a number, the later its sequence, and where the numbers of one
// sequence end those of the next begin no later than its rows do.

/// Where sequence n begins.
constexpr int start_of(const Indices& cumulative, int n, int rows) {
  return n == 0 ? 0 : std::max(0, std::min(cumulative.at(n), rows));
}

struct PackedTile {
  int b = 0;       ///< the sequence; the number of sequences for rows behind the last, which see nothing
  int number = 0;  ///< among the sequence's tiles
  int row_q = 0;   ///< where the sequence begins
  int row_k = 0;
  int length_q = 0;  ///< queries beyond the longest are computed, since nobody else would write their rows
  int length_k = 0;

  /// Of tiles of `rows` queries, where no sequence has more than `longest_k` keys.
  static constexpr PackedTile of(const GeneralArguments& general, int number, int rows, int longest_k) {
    int low = 0;
    int high = general.batch + 1;  // numbers of sequence b begin at its first row / rows + b
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (start_of(general.cumulative_q, middle, general.total_q) / rows + middle <= number) {
        low = middle;
      } else {
        high = middle;
      }
    }
    PackedTile tile{.b = low,
                    .row_q = start_of(general.cumulative_q, low, general.total_q),
                    .row_k = start_of(general.cumulative_k, low, general.total_k)};
    tile.number = number - (tile.row_q / rows + low);
    const bool owned = low < general.batch;
    const int end_q = owned ? start_of(general.cumulative_q, low + 1, general.total_q) : general.total_q;
    const int end_k = owned ? start_of(general.cumulative_k, low + 1, general.total_k) : tile.row_k;
    tile.length_q = std::max(0, end_q - tile.row_q);
    tile.length_k = std::max(0, std::min(end_k - tile.row_k, longest_k));
    return tile;
  }
};

}  // namespace tilewise::cuda::wgmma
