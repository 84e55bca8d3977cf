#pragma once

#include "cuda/attention/sm90/forward/loaders.cuh"
#include "cuda/attention/sm90/forward/mask.cuh"

namespace tilewise::cuda::wgmma {

// The loaders of K, of V and of masks, where a block mask lists the K tiles.

/// Loads K or V of all items, in the order of the lists, as load_tiles() does without lists. `ahead` is
/// called with an item, the walk and its K tile before the wait for a stage: then lists are read while the
/// stage is still in use.
template <ForwardConfig c, int dim, typename Ahead>
__device__ __forceinline__ void load_listed_tiles(const ForwardArguments& arguments, const CUtensorMap& map,
                                                  const SharedMemory<c>& shared, std::byte* first_smem,
                                                  Mbarrier (&full)[c.stages], Mbarrier (&empty)[c.stages],
                                                  bool keys, const Ahead& ahead) {
  Barriers<c>& barriers = shared.barriers();
  Ring<c.stages> ring;
  bool first = true;  // V waits until the CTA's first K tile has arrived, which is needed before it
  for_each_item<c>(shared, [&](const WorkItem& item) {
    const int h = quotient(item.h, arguments.group);
    const BlockLists lists(arguments.blocks, item, key_tiles_of<c>(arguments, item));
    BlockWalk walk(lists);
#pragma unroll 1
    for (int n = 0; n < item.loaded.count(); ++n) {
      const int tile = walk.next();
      if (first && !keys) wait(&barriers.first_keys_full, 0);
      ahead(item, walk, tile);
      wait(&empty[ring.stage()], ring.parity() ^ 1);
      if (keys) barriers.listed[ring.stage()] = 2 * tile + (walk.masked() ? 1 : 0);
      load_panels<dim, c.keys>(first_smem + ring.stage() * (c.keys * dim * 2), map, &full[ring.stage()],
                               tile * c.keys, h, item.b);
      if (first && keys) {
        wait(&full[ring.stage()], ring.parity());
        arrive(&barriers.first_keys_full);
      }
      first = false;
      ring.advance();
    }
    if (keys) arrive(&barriers.work_wanted);
  });
}

template <ForwardConfig c>
__device__ __forceinline__ void load_listed_keys(const ForwardArguments& arguments, const CUtensorMap& map,
                                                 const SharedMemory<c>& shared) {
  load_listed_tiles<c, c.dim>(arguments, map, shared, shared.keys(0), shared.barriers().k_full,
                              shared.barriers().k_empty, true, [](const WorkItem&, const BlockWalk&, int) {});
}

/// Loads V and, before it, the mask of the tile for each consumer that has queries.
template <ForwardConfig c>
__device__ __forceinline__ void load_listed_values(const ForwardArguments& arguments,
                                                   const CUtensorMap& map_v, const CUtensorMap& map_mask,
                                                   const SharedMemory<c>& shared) {
  MaskLoader<c> mask{arguments, map_mask, shared};
  const auto load_mask = [&](const WorkItem& item, const BlockWalk& walk, int tile) {
    if (!walk.masked()) return;
    const int id = walk.mask();
    const int key = (tile - walk.block()) * c.keys;
    const int block_row = quotient(item.first, arguments.blocks.queries) * arguments.blocks.queries;
#pragma unroll
    for (int w = 0; w < c.consumers; ++w) {
      const int first = first_row_of<c>(arguments, item, w);
      const BandOfKeys& band = c.general ? item.band : arguments.band;
      const int end = min(first + 64, band.length_q);
      if (tiles_of_rows<c>(band, 0, first, end).count() > 0) {
        mask.load_tile(w, mask.rings[w], first - block_row, key, id, 0);
      }
    }
  };
  load_listed_tiles<c, c.dim_v>(arguments, map_v, shared, shared.values(0), shared.barriers().v_full,
                                shared.barriers().v_empty, false, load_mask);
}

}  // namespace tilewise::cuda::wgmma
