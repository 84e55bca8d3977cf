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

/// The lane that asks, a tile ahead of the others. The first tile is the block's by its number; each block
/// asks until there are no more, so numbers are as many as tiles.
template <ForwardConfig c>
__device__ __forceinline__ void hand_out_turns(const ForwardArguments& arguments,
                                               const SharedMemory<c>& shared) {
  const Schedule& schedule = arguments.schedule;
  if (!schedule.counted()) return;
  Barriers<c>& barriers = shared.barriers();
  Ring<c.turn_stages> ring;
  int index = static_cast<int>(blockIdx.x);
  while (true) {
    wait(&barriers.turn_empty[ring.stage()], ring.parity() ^ 1);
    barriers.turns[ring.stage()] = index;
    arrive(&barriers.turn_full[ring.stage()]);
    ring.advance();
    if (index >= schedule.total()) return;
    index = schedule.blocks + next_number(arguments.counter, schedule.total() - 1);
  }
}

/// Calls `body` with each of the block's tiles in order; for a lane alone, or for all lanes of a warp.
template <ForwardConfig c, bool whole_warp, typename Body>
__device__ __forceinline__ void for_each_turn(const ForwardArguments& arguments,
                                              const SharedMemory<c>& shared, const Body& body) {
  const Schedule& schedule = arguments.schedule;
  Barriers<c>& barriers = shared.barriers();
  Ring<c.turn_stages> ring;
  int index = static_cast<int>(blockIdx.x);
#pragma unroll 1
  while (true) {
    if (schedule.counted()) {
      wait(&barriers.turn_full[ring.stage()], ring.parity());
      index = barriers.turns[ring.stage()];
      if (whole_warp) __syncwarp();  // all lanes have read it
      if (!whole_warp || threadIdx.x % 32 == 0) arrive(&barriers.turn_empty[ring.stage()]);
      ring.advance();
    }
    if (index >= schedule.total()) return;
    body(schedule.turn(index));
    if (!schedule.counted()) index += schedule.blocks;
  }
}

}  // namespace tilewise::cuda::wgmma
