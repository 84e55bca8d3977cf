#pragma once

#include "cuda/attention/sm90/forward/arguments.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/ring.cuh"

namespace tilewise::cuda::wgmma {

// What loaders and consumers share: stages for tiles in shared memory, each with two mbarriers. `full`
// completes a phase when a tile has arrived, `empty` when every warp that reads it has released it. Both
// sides go round the stages in the same order and never start over, not even between work items: one phase
// too many or too few would be a deadlock.

/// Named barriers. Number 0 is that of __syncthreads. A consumer has one of its own, at which it waits for
/// the signal to start products.
enum NamedBarrier : int { first_consumer_barrier = 1, loaders_may_start = 8, consumers_may_start = 9 };
constexpr int consumer_barrier(int consumer) { return first_consumer_barrier + consumer; }

/// What the scheduler publishes: a Q tile of a head, or that there are no more.
struct alignas(16) WorkItem {
  int b, h, first;
  int more;         ///< 0: there are no more items; otherwise 1 + the number of the split
  TileSpan loaded;  ///< K tiles that some row sees; if there are none, nothing is loaded, not even Q
  // Only for general calls:
  float slope, sink;
  BandOfKeys band;          ///< of the batch entry
  int map_b, row_q, row_k;  ///< where the entry's rows begin in the tensor maps
};
/// The 64 rows of a work item that a consumer owns.
struct alignas(16) ConsumerItem {
  int first;       ///< the first of the 64 rows
  TileSpan seen;   ///< K tiles that some of these rows see a key of
  TileSpan whole;  ///< K tiles of which all of these rows see all keys
};

/// Barriers of the mask's tiles. Each consumer has its own.
template <ForwardConfig c, bool masked = c.mask_tiles()>
struct MaskBarriers {};
template <ForwardConfig c>
struct MaskBarriers<c, true> {
  Mbarrier mask_full[c.consumers][c.mask_stages], mask_empty[c.consumers][c.mask_stages];
};

/// The number of K tiles of each published item for which consumers start products one after another.
template <ForwardConfig c, bool ordered = c.ordered>
struct OrderedSteps {};
template <ForwardConfig c>
struct OrderedSteps<c, true> {
  int steps[c.work_stages];
};

/// The K tile in each K stage, where a block mask lists K tiles: twice its number, plus 1 if the tile has a
/// mask. The loader of K writes it before it arrives at `k_full`.
template <ForwardConfig c, bool blocks = c.blocks>
struct ListedTiles {};
template <ForwardConfig c>
struct alignas(16) ListedTiles<c, true> {
  static_assert(c.stages <= 4);
  int listed[4];
};

/// The first byte of each published item's row of padding, or null where there is none.
template <ForwardConfig c, bool may_pad = c.may_pad()>
struct PaddingRows {};
template <ForwardConfig c>
struct PaddingRows<c, true> {
  const std::byte* padding[c.work_stages];
};

/// The mbarriers and work items in shared memory.
template <ForwardConfig c>
struct Barriers : MaskBarriers<c>, PaddingRows<c>, OrderedSteps<c>, ListedTiles<c> {
  Mbarrier q_full[c.q_stages], q_empty[c.q_stages];  ///< a Q stage belongs to one consumer
  Mbarrier k_full[c.stages], k_empty[c.stages];
  Mbarrier v_full[c.stages], v_empty[c.stages];
  Mbarrier work_full[c.work_stages], work_empty[c.work_stages];
  Mbarrier work_wanted;      ///< one phase per item: copies of all its K tiles have been issued
  Mbarrier first_keys_full;  ///< one phase: the CTA's first K tile has arrived
  WorkItem items[c.work_stages];
  ConsumerItem consumer_items[c.work_stages][c.consumers];

  /// Initialises the barriers of the CTA's first copies, by the warp that issues these.
  __device__ __forceinline__ void init_first() {
    if (!elected()) return;
    init_all(q_full, 1);
    init_all(k_full, 1);
    fence_barrier_inits();
  }
  /// Initialises the others, before a CTA-wide barrier. The work is spread over one lane of several warps.
  /// (The instruction takes its address from a uniform register, so the lanes of one warp would run one after
  /// another: 2,500 clocks for 24 barriers.)
  __device__ __forceinline__ void init(int warp) {
    constexpr int warps = 4;  // warps per consumer; each releases stages by itself
    constexpr int loaders = 3;
    if (warp == 0 || warp == 3 || warp > (c.mask_tiles() ? 6 : 5) || !elected()) return;
    if (warp == 1) {
      init_all(k_empty, warps * c.consumers);
    } else if (warp == 2) {
      init_all(v_full, 1);
      init_all(v_empty, warps * c.consumers);
    } else if (warp == 4) {
      init_all(q_empty, warps);
    } else if (c.mask_tiles() && warp == 6) {
      if constexpr (c.mask_tiles()) {
        for (auto& full : this->mask_full) init_all(full, 1);
        for (auto& empty : this->mask_empty) init_all(empty, warps);
      }
    } else {
      init_all(work_full, 1);
      init_all(work_empty, loaders + warps * c.consumers);
      init_barrier(&work_wanted, 1);
      init_barrier(&first_keys_full, 1);
    }
    fence_barrier_inits();
  }
  template <int count>
  static __device__ __forceinline__ void init_all(Mbarrier (&barriers)[count], int arrivals) {
#pragma unroll
    for (int n = 0; n < count; ++n) init_barrier(&barriers[n], arrivals);
  }
};

/// A CTA's shared memory: tiles, in panels of 64 columns with the 128-byte swizzle, then the barriers.
template <ForwardConfig c>
struct SharedMemory {
  static_assert(sizeof(Barriers<c>) == c.barrier_bytes());
  static_assert(!c.staged || (c.q_stages > c.consumers && !c.general && c.dim_v <= c.dim));
  static_assert(!c.paneled || (!c.staged && !c.general && !c.mask_tiles()));
  static_assert(!c.blocks ||
                (!c.masked && !c.trims && block_multiple % c.keys == 0 && block_multiple % c.rows() == 0));
  static_assert(c.key_bytes() % 1024 == 0 && c.value_bytes() % 1024 == 0 && c.query_bytes() % 1024 == 0);
  static_assert(c.shared_bytes() <= 232448);  // the most a CTA can have on Hopper

  std::byte* first;

  __device__ std::byte* queries(int place) const { return first + place * c.query_bytes(); }
  __device__ std::byte* keys(int stage) const {
    return first + c.q_stages * c.query_bytes() + stage * c.key_bytes();
  }
  __device__ std::byte* values(int stage) const { return keys(c.stages) + stage * c.value_bytes(); }
  /// A warp's two panels of O, where `paneled`.
  __device__ std::byte* output(int consumer, int warp) const {
    return values(c.stages) + consumer * c.output_bytes() + warp * (c.output_bytes() / 4);
  }
  /// A consumer's mask stages, where there are any.
  __device__ std::byte* mask(int consumer, int place) const {
    if constexpr (c.combined()) {
      return values(c.stages) + consumer * c.mask_bytes() + place * c.mask_stage_bytes();
    }
    return values(c.stages) + (consumer * c.mask_stages + place) * c.mask_stage_bytes();
  }
  __device__ Barriers<c>& barriers() const { return *reinterpret_cast<Barriers<c>*>(first + c.tile_bytes()); }
};

}  // namespace tilewise::cuda::wgmma
