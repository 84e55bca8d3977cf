#pragma once

#include <algorithm>

#include "cuda/attention/sm90/forward/arguments.h"

namespace tilewise::cuda::wgmma {

// The rows of packed sequences that a tile index stands for (packed_tiles in schedule.h). Cumulative lengths
// are clamped to the tensors, whatever they hold, and the first sequence starts at 0. So each row of queries
// belongs to some index: larger indices belong to later sequences, and where the indices of one sequence end,
// those of the next start no later than its rows.

/// The row at which sequence n starts.
constexpr int start_of(const Indices& cumulative, int n, int rows) {
  return n == 0 ? 0 : std::max(0, std::min(cumulative.at(n), rows));
}

struct PackedTile {
  int b = 0;       ///< the sequence; the number of sequences for rows past the last, which see no key
  int number = 0;  ///< of the tile among the sequence's
  int row_q = 0;   ///< first row of the sequence
  int row_k = 0;
  int length_q = 0;  ///< may exceed the longest length given: no other tile would write these rows
  int length_k = 0;

  /// The tile with index `number`, of `rows` queries, where no sequence has more than `longest_k` keys.
  static constexpr PackedTile of(const GeneralArguments& general, int number, int rows, int longest_k) {
    int low = 0;
    int high = general.batch + 1;  // indices of sequence b start at its first row / rows + b
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
