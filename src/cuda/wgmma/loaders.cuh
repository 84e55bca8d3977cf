#pragma once

#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/wgmma/turns.cuh"

namespace tilewise::cuda::wgmma {

// The three warps that load: one for queries, one for keys, one for values, each by one lane and at its own
// pace. Each goes through the block's tiles of queries as the consumers do, and loads what they will wait
// for.

/// Fills a place with `rows` rows in panels.
template <int dim, int rows>
__device__ __forceinline__ void load_panels(std::byte* to_smem, const CUtensorMap& map, Mbarrier* full, int s,
                                            int h, int b) {
  arrive_expecting(full, rows * dim * 2);
#pragma unroll
  for (int panel = 0; panel < dim / 64; ++panel) {
    copy_box(to_smem + panel * rows * 128, map, full, panel * 64, s, h, b);
  }
}

/// Rows from `first` on; where heads stand together, those of `1 << heads_log2` of them.
template <ForwardConfig c>
__device__ __forceinline__ void load_rows(std::byte* to_smem, const CUtensorMap& map, Mbarrier* full,
                                          int first, int heads_log2, const HandedTurn& turn) {
  const int s = (first >> heads_log2) + (c.general ? turn.row_q : 0);
  if constexpr (c.few) {
    arrive_expecting(full, c.query_bytes());
#pragma unroll
    for (int panel = 0; panel < c.dim / 64; ++panel) {
      copy_box_of_groups(to_smem + panel * 64 * 128, map, full, panel * 64, s, turn.h, turn.map_b);
    }
  } else {
    load_panels<c.dim, 64>(to_smem, map, full, s, turn.h, c.general ? turn.map_b : turn.b);
  }
}

template <ForwardConfig c>
__device__ __forceinline__ void load_queries(const CUtensorMap& map, const SharedMemory<c>& shared,
                                             int heads_log2) {
  Barriers<c>& barriers = shared.barriers();
  Ring<c.query_places> ring;
  for_each_turn<c>(shared, [&](const HandedTurn& turn) {
    if (turn.loaded.count() == 0) return;
    if (c.query_places < 2 * c.consumers && !c.few) {  // places are free late: have them near by then
      const int first = turn.first + (c.general ? turn.row_q : 0);
      const int b = c.general ? turn.map_b : turn.b;
      for (int panel = 0; panel < c.dim / 64; ++panel) {
        for (int w = 0; w < c.consumers; ++w) prefetch_box(map, panel * 64, first + 64 * w, turn.h, b);
      }
    }
#pragma unroll 1
    for (int w = 0; w < c.consumers; ++w) {
      wait(&barriers.q_empty[ring.stage()], ring.parity() ^ 1);
      load_rows<c>(shared.queries(ring.stage()), map, &barriers.q_full[ring.stage()], turn.first + 64 * w,
                   heads_log2, turn);
      ring.advance();
    }
  });
}

/// Keys, or values: tiles from the last to the first. That of keys arrives at
/// `turn_wanted` when it is through with a turn.
template <ForwardConfig c, int dim>
__device__ __forceinline__ void load_tiles(int group, const CUtensorMap& map, const SharedMemory<c>& shared,
                                           std::byte* first_smem, Mbarrier (&full)[c.stages],
                                           Mbarrier (&empty)[c.stages], bool keys) {
  Barriers<c>& barriers = shared.barriers();
  Ring<c.stages> ring;
  bool first = true;  // the block's first keys come before all else but its queries
  for_each_turn<c>(shared, [&](const HandedTurn& turn) {
    const int h = turn.h / group;
#pragma unroll 1
    for (int n = turn.loaded.last - 1; n >= turn.loaded.first; --n) {
      if (first && !keys) wait(&barriers.keys_came, 0);
      wait(&empty[ring.stage()], ring.parity() ^ 1);
      load_panels<dim, c.keys>(first_smem + ring.stage() * (c.keys * dim * 2), map, &full[ring.stage()],
                               n * c.keys + (c.general ? turn.row_k : 0), h, c.general ? turn.map_b : turn.b);
      if (first && keys) {
        wait(&full[ring.stage()], ring.parity());
        arrive(&barriers.keys_came);
      }
      first = false;
      ring.advance();
    }
    if (keys) arrive(&barriers.turn_wanted);
  });
}

}  // namespace tilewise::cuda::wgmma
