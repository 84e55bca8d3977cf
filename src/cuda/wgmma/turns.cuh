#pragma once

#include "cuda/wgmma/entries.cuh"
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

/// The tile of queries that has a number. Packed sequences leave some numbers without one: false.
template <ForwardConfig c>
__device__ __forceinline__ bool find_tile(const ForwardArguments& arguments, int number, HandedTurn& found) {
  const Turn turn = arguments.schedule.turn(number);
  if constexpr (c.general) {
    return find_tile_of_entry<c>(arguments, turn, found);
  } else {
    found = {.b = turn.head / arguments.heads_q,
             .h = turn.head % arguments.heads_q,
             .first = turn.tile * c.rows(),
             .more = 1};
    return true;
  }
}

/// The lane that knows what comes next, and tells the others while they are at the tile before. The first
/// tile is the block's by its number. Where turns are counted, each block asks until there are no more, so
/// numbers are as many as tiles; and it asks late, when the loader of keys has nothing more to do. A tile
/// that is taken before its time waits behind a long one while other blocks run out of work.
template <ForwardConfig c>
__device__ __forceinline__ void hand_out_turns(const ForwardArguments& arguments,
                                               const SharedMemory<c>& shared) {
  const Schedule& schedule = arguments.schedule;
  Barriers<c>& barriers = shared.barriers();
  Ring<c.turn_stages> ring;
  int number = static_cast<int>(blockIdx.x);
  std::uint32_t parity = 0;  // of the next turn that is wanted
#pragma unroll 1
  while (true) {
    HandedTurn turn{};
    const bool more = number < schedule.total();
    if (!more || find_tile<c>(arguments, number, turn)) {
      const BandOfKeys& band = c.general ? turn.band : arguments.band;
      const int end = min(turn.first + c.rows(), band.length_q);
      turn.loaded = band.tiles(turn.first, end, c.keys);
      const int stage = ring.stage();
      wait(&barriers.turn_empty[stage], ring.parity() ^ 1);
      barriers.turns[stage] = turn;
#pragma unroll 1
      for (int w = 0; w < c.consumers; ++w) {
        const int own = turn.first + 64 * w;
        const int own_end = min(own + 64, end);
        barriers.parts[stage][w] = {.seen = band.tiles(own, own_end, c.keys),
                                    .whole = band.whole_tiles(own, own_end, c.keys)};
      }
      arrive(&barriers.turn_full[stage]);
      ring.advance();
      if (more && schedule.counted()) {
        wait(&barriers.turn_wanted, parity);
        parity ^= 1;
      }
    }
    if (!more) return;
    number = schedule.counted() ? schedule.blocks + next_number(arguments.counter, schedule.total() - 1)
                                : number + schedule.blocks;
  }
}

/// Calls `body` with each of the block's turns in order; for a loader's lane.
template <ForwardConfig c, typename Body>
__device__ __forceinline__ void for_each_turn(const SharedMemory<c>& shared, const Body& body) {
  Barriers<c>& barriers = shared.barriers();
  Ring<c.turn_stages> ring;
#pragma unroll 1
  while (true) {
    wait(&barriers.turn_full[ring.stage()], ring.parity());
    const HandedTurn turn = barriers.turns[ring.stage()];
    arrive(&barriers.turn_empty[ring.stage()]);
    ring.advance();
    if (turn.more == 0) return;
    body(turn);
  }
}

}  // namespace tilewise::cuda::wgmma
