#pragma once

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm90/forward/packed.h"
#include "cuda/attention/sm90/forward/pipeline.cuh"

namespace tilewise::cuda::wgmma {

// Entries of a general call: their lengths are in memory, and packed ones lie behind one another.

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
    const PackedTile own = PackedTile::of(general, number, c.rows() >> heads_log2, length_k);
    found.b = own.b;
    found.row_q = own.row_q;
    found.row_k = own.row_k;
    tile = own.number;
    length_q = own.length_q;
    length_k = own.length_k;
    if (own.b == general.batch) {  // nobody's rows
      found.band.set_lengths(length_q, 0, general.alignment);
      found.first = tile * c.rows();
      found.sink = minus_infinity;
      return found.first < length_q << heads_log2;
    }
  } else {
    found.b = found.map_b = quotient(turn.head, arguments.heads);
    found.h = turn.head - found.b * arguments.heads;
  }
  if (general.key_lengths.data != nullptr) {
    length_k = max(0, min(general.key_lengths.at(found.b), length_k));
  }
  found.band.set_lengths(length_q, length_k, general.alignment);
  found.first = tile * c.rows();
  found.slope = general.alibi ? static_cast<float>(general.alibi_slopes.at(found.b, found.h)) : 0.0f;
  found.sink =
      general.sinks.data != nullptr ? static_cast<float>(general.sinks.at(found.b, found.h)) : minus_infinity;
  return found.first < length_q << heads_log2;
}

}  // namespace tilewise::cuda::wgmma
