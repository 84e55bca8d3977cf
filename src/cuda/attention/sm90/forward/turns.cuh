#pragma once

#include "cuda/attention/sm90/forward/entries.cuh"
#include "cuda/attention/sm90/forward/pipeline.cuh"

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
    const bool one_entry = arguments.heads == arguments.schedule.heads;  // a division takes 100 clocks
    const int b = one_entry ? 0 : quotient(turn.head, arguments.heads);
    found = {.b = b, .h = turn.head - b * arguments.heads, .first = turn.tile * c.rows(), .more = 1};
    return true;
  }
}

/// Tiles of keys that rows [begin, end) of an entry see something of.
template <ForwardConfig c>
__device__ __forceinline__ TileSpan tiles_of_rows(const BandOfKeys& band, int heads_log2, int begin,
                                                  int end) {
  return begin < end ? band.tiles(begin >> heads_log2, ((end - 1) >> heads_log2) + 1, c.keys) : TileSpan{};
}

/// The first of the 64 rows that a consumer has of a turn.
template <ForwardConfig c>
__device__ __forceinline__ int first_row_of(const ForwardArguments& arguments, const HandedTurn& turn,
                                            int consumer) {
  if constexpr (c.general) return turn.first + 64 * consumer;
  return arguments.schedule.first_row(quotient(turn.first, c.rows()), consumer, c.consumers,
                                      arguments.band.length_q);
}

/// Tiles of keys that some of a turn's rows see. Where long and short rows are mixed, the first consumer's
/// see all of them.
template <ForwardConfig c>
__device__ __forceinline__ TileSpan tiles_of_turn(const ForwardArguments& arguments, const HandedTurn& turn) {
  const BandOfKeys& band = c.general ? turn.band : arguments.band;
  const int heads_log2 = c.few ? arguments.few.heads_log2 : 0;
  const bool mixed = !c.general && arguments.schedule.mixed;
  const int begin = mixed ? first_row_of<c>(arguments, turn, 0) : turn.first;
  const int end = min(begin + (mixed ? 64 : c.rows()), band.length_q << heads_log2);
  const TileSpan all = tiles_of_rows<c>(band, heads_log2, begin, end);
  return c.few ? all.share(turn.more - 1, arguments.few.shares) : all;
}

/// How many tiles of keys, after its first, each consumer sees of a turn.
template <ForwardConfig c>
__device__ __forceinline__ int steps_of_all(const ForwardArguments& arguments, const HandedTurn& turn) {
  const int own = first_row_of<c>(arguments, turn, lane_now() % c.consumers);
  const int end = min(own + 64, arguments.band.length_q);
  return max(__reduce_min_sync(~0u, tiles_of_rows<c>(arguments.band, 0, own, end).count() - 1), 0);
}

/// Leaves a turn, or that there is no more, where the others read it. By a warp: each consumer's part is
/// worked out by a lane of its own, since one after another they would take longer than a short tile.
template <ForwardConfig c>
__device__ __forceinline__ void leave_turn(const ForwardArguments& arguments, Barriers<c>& barriers,
                                           int stage, HandedTurn turn) {
  const BandOfKeys& band = c.general ? turn.band : arguments.band;
  const int heads_log2 = c.few ? arguments.few.heads_log2 : 0;
  turn.loaded = tiles_of_turn<c>(arguments, turn);
  if constexpr (c.ordered) barriers.steps[stage] = steps_of_all<c>(arguments, turn);
  const int lane = lane_now();
  if (lane < c.consumers) {
    const int own = first_row_of<c>(arguments, turn, lane);
    const int end = min(own + 64, band.length_q << heads_log2);
    TileSpan seen = tiles_of_rows<c>(band, heads_log2, own, end);
    if constexpr (c.few) seen = seen.cut(turn.loaded);
    barriers.parts[stage][lane] = {
        .first = own,
        .seen = seen,
        .whole = band.whole_tiles(own >> heads_log2, ((end - 1) >> heads_log2) + 1, c.keys)};
  }
  if (lane == 0) barriers.turns[stage] = turn;
  __syncwarp();  // all of it is there
}

/// The warp that knows what comes next, and tells the others while they are at the tile before. The first
/// tile is the block's by its number. Where turns are counted, each block asks until there are no more, so
/// numbers are as many as tiles; and it asks late, when the loader of keys has nothing more to do. A tile
/// that is taken before its time waits behind a long one while other blocks run out of work.
template <ForwardConfig c>
struct TurnKeeper {
  const ForwardArguments& arguments;
  Barriers<c>& barriers;
  int number = static_cast<int>(blockIdx.x);
  bool left = false;  ///< whether the turn of that number has been left already

  /// The block's first turn is left before the barriers are there.
  __device__ __forceinline__ void leave_first() {
    HandedTurn turn{};
    left = number < arguments.schedule.total() && find_tile<c>(arguments, number, turn);
    if (left) leave_turn<c>(arguments, barriers, 0, turn);
  }

  __device__ __forceinline__ int next() const {
    const Schedule& schedule = arguments.schedule;
    if (!schedule.counted()) return number + schedule.blocks;
    int found = 0;
    if (lane_now() == 0) found = schedule.blocks + next_number(arguments.counter, schedule.total() - 1);
    return __shfl_sync(~0u, found, 0);
  }

  __device__ __forceinline__ void hand_out() {
    const Schedule& schedule = arguments.schedule;
    Ring<c.turn_stages> ring;
    std::uint32_t parity = 0;  // of the next turn that is wanted
#pragma unroll 1
    while (true) {
      HandedTurn turn{};
      const bool more = number < schedule.total();
      if (left || !more || find_tile<c>(arguments, number, turn)) {
        if (!left) {
          wait(&barriers.turn_empty[ring.stage()], ring.parity() ^ 1);
          leave_turn<c>(arguments, barriers, ring.stage(), turn);
        }
        left = false;
        if (lane_now() == 0) arrive(&barriers.turn_full[ring.stage()]);
        ring.advance();
        if (more && schedule.counted()) {
          wait(&barriers.turn_wanted, parity);
          parity ^= 1;
        }
      }
      if (!more) return;
      number = next();
    }
  }
};

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
