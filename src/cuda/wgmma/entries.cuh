#pragma once

#include "cuda/tile/score.cuh"
#include "cuda/wgmma/arguments.h"
#include "cuda/wgmma/pipeline.cuh"

namespace tilewise::cuda::wgmma {

// Entries of a general call: their lengths are in memory, and packed ones lie behind one another.

// The numbers there are brought inside the tensors, as Starts does it (attention/call.h), whatever they are.
// Each row of queries is some number's then: the larger a number, the later its sequence, and where those of
// one sequence end the next begins no later than its rows do.

/// Where sequence n of packed rows begins.
__device__ __forceinline__ int start_of(const Indices& cumulative, int n, int rows) {
  return n == 0 ? 0 : max(0, min(cumulative.at(n), rows));
}

/// The sequence that a number belongs to.
__device__ __forceinline__ int sequence_of(const GeneralArguments& general, int number, int rows) {
  int low = 0;
  int high = general.batch + 1;  // numbers of sequence b begin at cumulative / rows + b
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (start_of(general.cumulative_q, middle, general.total_q) / rows + middle <= number) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Fills in a turn, but for what follows from its band; false where it has no queries.
template <ForwardConfig c>
__device__ __forceinline__ bool find_tile_of_entry(const ForwardArguments& arguments, const Turn& turn,
                                                   HandedTurn& found) {
  const GeneralArguments& general = arguments.general;
  const int heads_log2 = c.few ? arguments.few.heads_log2 : 0;
  const int number = c.few ? turn.tile / arguments.few.shares : turn.tile;
  int tile = number;
  found.more = c.few ? 1 + turn.tile % arguments.few.shares : 1;
  found.band = arguments.band;
  int length_q = found.band.length_q;
  int length_k = found.band.length_k;
  if (general.packed) {
    found.h = turn.head;
    found.b = sequence_of(general, number, c.rows() >> heads_log2);
    found.row_q = start_of(general.cumulative_q, found.b, general.total_q);
    found.row_k = start_of(general.cumulative_k, found.b, general.total_k);
    tile -= found.row_q / (c.rows() >> heads_log2) + found.b;
    const bool owned = found.b < general.batch;
    // Queries beyond the longest are computed, since nobody else would write their rows.
    const int end_q =
        owned ? start_of(general.cumulative_q, found.b + 1, general.total_q) : general.total_q;
    length_q = max(0, end_q - found.row_q);
    if (owned) {
      const int end_k = start_of(general.cumulative_k, found.b + 1, general.total_k);
      length_k = max(0, min(end_k - found.row_k, length_k));
    } else {
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
