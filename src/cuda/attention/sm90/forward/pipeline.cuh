#pragma once

#include "cuda/attention/sm90/forward/arguments.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/ring.cuh"

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
  int first;       ///< of these
  TileSpan seen;   ///< tiles of keys that some of these see something of
  TileSpan whole;  ///< those that all see all of
};

/// Those of a mask's tiles, which are a consumer's own.
template <ForwardConfig c, bool masked = c.masked>
struct MaskBarriers {};
template <ForwardConfig c>
struct MaskBarriers<c, true> {
  Mbarrier mask_full[c.consumers][c.mask_places], mask_empty[c.consumers][c.mask_places];
};

/// Where consumers start products in turn: of how many tiles of keys they do, for each place of turns.
template <ForwardConfig c, bool ordered = c.ordered>
struct OrderedSteps {};
template <ForwardConfig c>
struct OrderedSteps<c, true> {
  int steps[c.turn_stages];
};

/// The barriers, as they stand in shared memory.
template <ForwardConfig c>
struct Barriers : MaskBarriers<c>, OrderedSteps<c> {
  Mbarrier q_full[c.query_places], q_empty[c.query_places];  ///< queries are a consumer's own
  Mbarrier k_full[c.stages], k_empty[c.stages];
  Mbarrier v_full[c.stages], v_empty[c.stages];
  Mbarrier turn_full[c.turn_stages], turn_empty[c.turn_stages];
  Mbarrier turn_wanted;  ///< a phase a turn: all its keys have been asked for
  Mbarrier keys_came;    ///< once: the block's first keys
  HandedTurn turns[c.turn_stages];
  HandedPart parts[c.turn_stages][c.consumers];

  /// Those that the block's first copies come to, by the warp that asks for these.
  __device__ __forceinline__ void init_first() {
    if (!elected()) return;
    init_all(q_full, 1);
    init_all(k_full, 1);
    fence_barrier_inits();
  }
  /// The others, by other warps, before a barrier of the block: one lane of some, so that each has few.
  /// (The instruction takes its address from a uniform register. Lanes with barriers of their own would take
  /// turns: 2,500 clocks for 24.)
  __device__ __forceinline__ void init(int warp) {
    constexpr int warps = 4;  // that let go, of a consumer
    constexpr int loaders = 3;
    if (warp == 0 || warp == 3 || warp > (c.masked ? 6 : 5) || !elected()) return;
    if (warp == 1) {
      init_all(k_empty, warps * c.consumers);
    } else if (warp == 2) {
      init_all(v_full, 1);
      init_all(v_empty, warps * c.consumers);
    } else if (warp == 4) {
      init_all(q_empty, warps);
    } else if (c.masked && warp == 6) {
      if constexpr (c.masked) {
        for (auto& full : this->mask_full) init_all(full, 1);
        for (auto& empty : this->mask_empty) init_all(empty, warps);
      }
    } else {
      init_all(turn_full, 1);
      init_all(turn_empty, loaders + warps * c.consumers);
      init_barrier(&turn_wanted, 1);
      init_barrier(&keys_came, 1);
    }
    fence_barrier_inits();
  }
  template <int count>
  static __device__ __forceinline__ void init_all(Mbarrier (&barriers)[count], int arrivals) {
#pragma unroll
    for (int n = 0; n < count; ++n) init_barrier(&barriers[n], arrivals);
  }
};

/// A block's shared memory: tiles in panels of 64 columns, then the barriers.
template <ForwardConfig c>
struct SharedMemory {
  static_assert(sizeof(Barriers<c>) == c.barrier_bytes());
  static_assert(!c.staged || (c.query_places > c.consumers && !c.general && c.dim_v <= c.dim));
  static_assert(!c.paneled || (!c.staged && !c.general && !c.masked));
  static_assert(c.key_bytes() % 1024 == 0 && c.value_bytes() % 1024 == 0 && c.query_bytes() % 1024 == 0);
  static_assert(c.shared_bytes() <= 232448);  // what a block may have on Hopper

  std::byte* first;

  __device__ std::byte* queries(int place) const { return first + place * c.query_bytes(); }
  __device__ std::byte* keys(int stage) const {
    return first + c.query_places * c.query_bytes() + stage * c.key_bytes();
  }
  __device__ std::byte* values(int stage) const { return keys(c.stages) + stage * c.value_bytes(); }
  /// A warp's two panels of o, where it has such.
  __device__ std::byte* output(int consumer, int warp) const {
    return values(c.stages) + consumer * c.output_bytes() + warp * (c.output_bytes() / 4);
  }
  /// Of a consumer, where there are masks.
  __device__ std::byte* mask(int consumer, int place) const {
    return values(c.stages) + (consumer * c.mask_places + place) * c.mask_place_bytes();
  }
  __device__ Barriers<c>& barriers() const { return *reinterpret_cast<Barriers<c>*>(first + c.tile_bytes()); }
};

}  // namespace tilewise::cuda::wgmma
