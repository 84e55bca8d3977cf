#pragma once

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm90/forward/arguments.h"
#include "cuda/attention/sm90/forward/pipeline.cuh"

namespace tilewise::cuda::wgmma {

// Entries of a general call: their lengths are in memory, and packed ones lie behind one another.

/// The sequence that a number belongs to.
__device__ __forceinline__ int sequence_of(const GeneralArguments& general, int number, int rows) {
  int low = 0;
  int high = general.batch + 1;  // numbers of sequence b begin at cumulative / rows + b
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (general.cumulative_q.at(middle) / rows + middle <= number) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Fills in a work item, but for what follows from its band; false where it has no queries.
template <ForwardConfig c>
__device__ __forceinline__ bool find_item_of_entry(const ForwardArguments& arguments, const WorkTile& turn,
                                                   WorkItem& found) {
  const GeneralArguments& general = arguments.general;
  const int heads_log2 = c.decode ? arguments.decode.heads_log2 : 0;
  const int number = c.decode ? turn.tile / arguments.decode.splits : turn.tile;
  int tile = number;
  found.more = c.decode ? 1 + turn.tile % arguments.decode.splits : 1;
  found.band = arguments.band;
  int length_q = found.band.length_q;
  int length_k = found.band.length_k;
  if (general.packed) {
    found.h = turn.head;
    found.b = sequence_of(general, number, c.rows() >> heads_log2);
    found.row_q = general.cumulative_q.at(found.b);
    found.row_k = general.cumulative_k.at(found.b);
    tile -= found.row_q / (c.rows() >> heads_log2) + found.b;
    const bool owned = found.b < general.batch;
    length_q = (owned ? general.cumulative_q.at(found.b + 1) : general.total_q) - found.row_q;
    length_k = owned ? general.cumulative_k.at(found.b + 1) - found.row_k : 0;
    if (!owned) {
      found.band.set_lengths(length_q, 0, general.alignment);
      found.first = tile * c.rows();
      found.sink = minus_infinity;
      return found.first < length_q << heads_log2;
    }
  } else {
    found.b = found.map_b = quotient(turn.head, arguments.heads);
    found.h = turn.head - found.b * arguments.heads;
  }
  if (general.key_lengths.data != nullptr) length_k = general.key_lengths.at(found.b);
  found.band.set_lengths(length_q, length_k, general.alignment);
  found.first = tile * c.rows();
  found.slope = general.alibi ? static_cast<float>(general.alibi_slopes.at(found.b, found.h)) : 0.0f;
  found.sink =
      general.sinks.data != nullptr ? static_cast<float>(general.sinks.at(found.b, found.h)) : minus_infinity;
  return found.first < length_q << heads_log2;
}

}  // namespace tilewise::cuda::wgmma
