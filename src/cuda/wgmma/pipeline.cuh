#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/wgmma/arguments.h"

namespace tilewise::cuda::wgmma {

// What loaders and consumers share: places for tiles, each with two barriers. `full` ends a phase when a tile
// has come, `empty` when every warp that reads it has let it go. Both sides go round the places in the same
// order and never start anew, from one tile of queries to the next either: a phase too many or too few would
// be waited for without end.

/// What is handed out at a place of turns: a tile of queries, or that there is no more.
struct alignas(16) HandedTurn {
  int b, h, first;
  int more;         ///< 0: no; else 1 and the number of the share of its keys
  TileSpan loaded;  ///< tiles of keys that some of its queries see; where there are none, nothing is loaded
  // Of a general call alone.
  float slope, sink;
  BandOfKeys band;          ///< of the entry
  int map_b, row_q, row_k;  ///< where its rows begin in the tensors
};
/// What of it concerns a consumer, which has 64 of the queries.
struct alignas(16) HandedPart {
  TileSpan seen;   ///< tiles of keys that some of these see something of
  TileSpan whole;  ///< those that all see all of
};

/// The barriers, as they stand in shared memory.
template <ForwardConfig c>
struct Barriers {
  Mbarrier q_full[c.query_places], q_empty[c.query_places];  ///< queries are a consumer's own
  Mbarrier k_full[c.stages], k_empty[c.stages];
  Mbarrier v_full[c.stages], v_empty[c.stages];
  Mbarrier turn_full[c.turn_stages], turn_empty[c.turn_stages];
  Mbarrier turn_wanted;  ///< a phase a turn: all its keys have been asked for
  Mbarrier keys_came;    ///< once: the block's first keys
  HandedTurn turns[c.turn_stages];
  HandedPart parts[c.turn_stages][c.consumers];

  static constexpr int count = c.barriers();
  /// How many arrive at a barrier, by its number in the order above.
  static __device__ int arrivals(int number) {
    constexpr int warps = 4;  // that let go, of a consumer
    constexpr int loaders = 3;
    const int behind_queries = number - 2 * c.query_places;
    if (behind_queries < 0) return number < c.query_places ? 1 : warps;
    const int behind_tiles = behind_queries - 4 * c.stages;
    if (behind_tiles < 0) return behind_queries / c.stages % 2 == 0 ? 1 : warps * c.consumers;
    return behind_tiles / c.turn_stages == 1 ? loaders + warps * c.consumers : 1;
  }
  /// By the lanes of a warp, before a barrier of the block.
  __device__ void init(int lane) {
    for (int number = lane; number < count; number += 32) {
      init_barrier(reinterpret_cast<Mbarrier*>(this) + number, arrivals(number));
    }
    fence_barrier_inits();
  }
};

/// A block's shared memory: tiles in panels of 64 columns, then the barriers.
template <ForwardConfig c>
struct SharedMemory {
  static_assert(sizeof(Barriers<c>) == c.barrier_bytes());
  static_assert(!c.staged || (c.query_places > c.consumers && !c.general && c.dim_v <= c.dim));
  static_assert(c.key_bytes() % 1024 == 0 && c.value_bytes() % 1024 == 0 && c.query_bytes() % 1024 == 0);
  static_assert(c.shared_bytes() <= 232448);  // what a block may have on Hopper

  std::byte* first;

  __device__ std::byte* queries(int place) const { return first + place * c.query_bytes(); }
  __device__ std::byte* keys(int stage) const {
    return first + c.query_places * c.query_bytes() + stage * c.key_bytes();
  }
  __device__ std::byte* values(int stage) const { return keys(c.stages) + stage * c.value_bytes(); }
  __device__ Barriers<c>& barriers() const { return *reinterpret_cast<Barriers<c>*>(first + c.tile_bytes()); }
};

}  // namespace tilewise::cuda::wgmma
