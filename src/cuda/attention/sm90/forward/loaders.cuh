#pragma once

#include "cuda/attention/sm90/forward/mask.cuh"
#include "cuda/attention/sm90/forward/scheduler.cuh"
#include "cuda/ptx/tensor_copy.cuh"

namespace tilewise::cuda::wgmma {

// The loader warps: one for Q, one for K, one for V. One lane of each issues the TMA copies, at its own pace.
// Each goes through the CTA's work items as the consumers do, and loads what they will wait for.

/// Copies `rows` rows into a stage, a panel of 64 columns at a time.
template <int dim, int rows>
__device__ __forceinline__ void load_panels(std::byte* to_smem, const CUtensorMap& map, Mbarrier* full, int s,
                                            int h, int b) {
  arrive_expecting(full, rows * dim * 2);
#pragma unroll
  for (int panel = 0; panel < dim / 64; ++panel) {
    copy_box(to_smem + panel * rows * 128, map, full, panel * 64, s, h, b);
  }
}

/// Copies 64 rows of Q from `first` on: of one head, or of the `1 << heads_log2` heads of a packed group.
template <ForwardConfig c>
__device__ __forceinline__ void load_rows(std::byte* to_smem, const CUtensorMap& map, Mbarrier* full,
                                          int first, int heads_log2, const WorkItem& item) {
  const int s = (first >> heads_log2) + (c.general ? item.row_q : 0);
  if constexpr (c.decode) {
    arrive_expecting(full, c.query_bytes());
#pragma unroll
    for (int panel = 0; panel < c.dim / 64; ++panel) {
      copy_box_of_groups(to_smem + panel * 64 * 128, map, full, panel * 64, s, item.h, item.map_b);
    }
  } else {
    load_panels<c.dim, 64>(to_smem, map, full, s, item.h, c.general ? item.map_b : item.b);
  }
}

/// Loads Q of an item, for the consumers from `w` on, each into the next stage.
template <ForwardConfig c>
__device__ __forceinline__ void load_queries_of_item(const ForwardArguments& arguments,
                                                     const CUtensorMap& map, const SharedMemory<c>& shared,
                                                     const WorkItem& item, Ring<c.q_stages>& ring, int w) {
  Barriers<c>& barriers = shared.barriers();
  const int heads_log2 = c.decode ? arguments.decode.heads_log2 : 0;
#pragma unroll 1
  for (; w < c.consumers; ++w) {
    wait(&barriers.q_empty[ring.stage()], ring.parity() ^ 1);
    load_rows<c>(shared.queries(ring.stage()), map, &barriers.q_full[ring.stage()],
                 first_row_of<c>(arguments, item, w), heads_log2, item);
    ring.advance();
  }
}

/// Whether the loaders can find the CTA's first item by themselves. Only the scheduler reads entries, lists
/// and padding from memory.
template <ForwardConfig c>
__device__ __forceinline__ bool knows_first_item(const ForwardArguments& arguments) {
  return !c.general && !c.blocks && !(c.masked && arguments.padding.given());
}

/// Finds the CTA's first item, in the warp that loads K. False if nothing is to be loaded for it.
template <ForwardConfig c>
__device__ __forceinline__ bool find_first_item(const ForwardArguments& arguments, WorkItem& item) {
  if (!knows_first_item<c>(arguments)) return false;
  if (!find_item<c>(arguments, static_cast<int>(blockIdx.x), item)) return false;
  item.loaded = key_tiles_of<c>(arguments, item);
  return item.loaded.count() > 0;
}

/// Issues the copies that a CTA needs first, Q and the first K tile, before its other warps have started.
/// Returns whether there were any. Where long and short rows are mixed, only the first consumer's rows see
/// this tile: Q of the others comes later.
template <ForwardConfig c>
__device__ __forceinline__ bool load_first(const ForwardArguments& arguments, const CUtensorMap& map_q,
                                           const CUtensorMap& map_k, const SharedMemory<c>& shared) {
  Barriers<c>& barriers = shared.barriers();
  barriers.init_first();
  WorkItem item{};
  if (!find_first_item<c>(arguments, item)) return false;
  __syncwarp();  // the barriers are initialised
  if (elected()) {
    const auto load_queries_of = [&](int w) {
      load_rows<c>(shared.queries(w), map_q, &barriers.q_full[w], first_row_of<c>(arguments, item, w), 0,
                   item);
    };
    load_queries_of(0);
    load_panels<c.dim, c.keys>(shared.keys(0), map_k, &barriers.k_full[0], (item.loaded.last - 1) * c.keys,
                               arguments.group == 1 ? item.h : quotient(item.h, arguments.group), item.b);
    if (!arguments.schedule.mixed) {
#pragma unroll 1
      for (int w = 1; w < c.consumers; ++w) load_queries_of(w);
    }
  }
  return true;
}

/// Loads Q of all items, except for what load_first() has loaded.
template <ForwardConfig c>
__device__ __forceinline__ void load_queries(const ForwardArguments& arguments, const CUtensorMap& map,
                                             const SharedMemory<c>& shared) {
  Ring<c.q_stages> ring;
  bool first_loaded = knows_first_item<c>(arguments);  // for the first item, if it has anything to load
  for_each_item<c>(shared, [&](const WorkItem& item) {
    int w = 0;
    if (first_loaded && item.loaded.count() > 0) {
      w = arguments.schedule.mixed ? 1 : c.consumers;
      for (int n = 0; n < w; ++n) ring.advance();
      if (w < c.consumers) wait(&shared.barriers().first_keys_full, 0);
    }
    first_loaded = false;
    if (item.loaded.count() == 0 || w == c.consumers) return;
    if (c.q_stages < 2 * c.consumers && !c.decode) {  // stages become free late: prefetch to L2
      const int b = c.general ? item.map_b : item.b;
      for (int panel = 0; panel < c.dim / 64; ++panel) {
        for (int n = w; n < c.consumers; ++n) {
          const int first = first_row_of<c>(arguments, item, n) + (c.general ? item.row_q : 0);
          prefetch_box(map, panel * 64, first, item.h, b);
        }
      }
    }
    load_queries_of_item<c>(arguments, map, shared, item, ring, w);
  });
}

/// Loads K or V of all items, tiles from the last to the first. The loader of K arrives at `work_wanted` when
/// it has issued all copies of an item. `ahead` is called with an item and a tile before the wait for a
/// stage.
template <ForwardConfig c, int dim, typename Ahead>
__device__ __forceinline__ void load_tiles(int group, const CUtensorMap& map, const SharedMemory<c>& shared,
                                           std::byte* first_smem, Mbarrier (&full)[c.stages],
                                           Mbarrier (&empty)[c.stages], bool keys, bool first_loaded,
                                           const Ahead& ahead) {
  Barriers<c>& barriers = shared.barriers();
  Ring<c.stages> ring;
  bool first = true;  // V waits until the CTA's first K tile has arrived, which is needed before it
  for_each_item<c>(shared, [&](const WorkItem& item) {
    const int h = quotient(item.h, group);
#pragma unroll 1
    for (int n = item.loaded.last - 1; n >= item.loaded.first; --n) {
      if (first && !keys) wait(&barriers.first_keys_full, 0);
      ahead(item, n);
      if (!first_loaded) {
        wait(&empty[ring.stage()], ring.parity() ^ 1);
        load_panels<dim, c.keys>(first_smem + ring.stage() * (c.keys * dim * 2), map, &full[ring.stage()],
                                 n * c.keys + (c.general ? item.row_k : 0), h,
                                 c.general ? item.map_b : item.b);
      }
      first_loaded = false;
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
