#pragma once

#include "cuda/wgmma/arguments.h"
#include "cuda/wgmma/pipeline.cuh"

namespace tilewise::cuda::wgmma {

// How the roles of a block come to the same tiles of queries in the same order.

/// The next number of all blocks, from 0 on. The counter is any word to begin with: its upper half says whose
/// it is. Who gets the last number clears it, so that the same launch can be repeated in a graph.
__device__ __forceinline__ int next_number(const TurnCounter& counter, int last) {
  const auto mine = static_cast<unsigned long long>(counter.owner) << 32;
  unsigned long long found = atomicAdd(counter.word, 1ull);
  while (found >> 32 != counter.owner) {
    const unsigned long long before = atomicAdd(counter.word, 0ull);
    if (before >> 32 == counter.owner) {
      found = atomicAdd(counter.word, 1ull);
    } else if (atomicCAS(counter.word, before, mine | 1) == before) {
      found = mine;
    }
  }
  const int number = static_cast<int>(found & 0xFFFFFFFFu);
  if (number == last) atomicExch(counter.word, 0ull);
  return number;
}

/// The lane that knows what comes next, and tells the others while they are at the tile before. The first
/// tile is the block's by its number. Where turns are counted, each block asks until there are no more, so
/// numbers are as many as tiles.
template <ForwardConfig c>
__device__ __forceinline__ void hand_out_turns(const ForwardArguments& arguments,
                                               const SharedMemory<c>& shared) {
  const Schedule& schedule = arguments.schedule;
  Barriers<c>& barriers = shared.barriers();
  Ring<c.turn_stages> ring;
  int index = static_cast<int>(blockIdx.x);
  while (true) {
    const bool more = index < schedule.total();
    const Turn turn = more ? schedule.turn(index) : Turn{};
    wait(&barriers.turn_empty[ring.stage()], ring.parity() ^ 1);
    barriers.turns[ring.stage()] = {.b = turn.head / arguments.heads_q,
                                    .h = turn.head % arguments.heads_q,
                                    .first = turn.tile * c.rows(),
                                    .more = more};
    arrive(&barriers.turn_full[ring.stage()]);
    ring.advance();
    if (!more) return;
    index = schedule.counted() ? schedule.blocks + next_number(arguments.counter, schedule.total() - 1)
                               : index + schedule.blocks;
  }
}

/// A block's tile of queries.
struct QueryTile {
  int b, h, first;
  TileSpan keys;  ///< that some of its queries see; where there are none, nothing is loaded
};

/// Calls `body` with each of the block's tiles in order; for a lane alone, or for all lanes of a warp.
template <ForwardConfig c, bool whole_warp, typename Body>
__device__ __forceinline__ void for_each_tile(const ForwardArguments& arguments,
                                              const SharedMemory<c>& shared, const Body& body) {
  const BandOfKeys& band = arguments.band;
  Barriers<c>& barriers = shared.barriers();
  Ring<c.turn_stages> ring;
#pragma unroll 1
  while (true) {
    wait(&barriers.turn_full[ring.stage()], ring.parity());
    const HandedTurn turn = barriers.turns[ring.stage()];
    if (whole_warp) __syncwarp();  // all lanes have read it
    if (!whole_warp || threadIdx.x % 32 == 0) arrive(&barriers.turn_empty[ring.stage()]);
    ring.advance();
    if (turn.more == 0) return;
    const int end = min(turn.first + c.rows(), band.length_q);
    body(QueryTile{turn.b, turn.h, turn.first, band.tiles(turn.first, end, c.keys)});
  }
}

}  // namespace tilewise::cuda::wgmma
