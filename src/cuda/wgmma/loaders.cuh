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

template <ForwardConfig c>
__device__ __forceinline__ void load_queries(const CUtensorMap& map, const SharedMemory<c>& shared) {
  prefetch_map(map);
  Barriers<c>& barriers = shared.barriers();
  Ring<c.query_places> ring;
  for_each_turn<c>(shared, [&](const HandedTurn& turn) {
    if (turn.loaded.count() == 0) return;
    const int first = turn.first + (c.general ? turn.row_q : 0);
    const int b = c.general ? turn.map_b : turn.b;
    if (c.query_places < 2 * c.consumers) {  // places are free late: have them near by then
      for (int panel = 0; panel < c.dim / 64; ++panel) {
        for (int w = 0; w < c.consumers; ++w) prefetch_box(map, panel * 64, first + 64 * w, turn.h, b);
      }
    }
#pragma unroll 1
    for (int w = 0; w < c.consumers; ++w) {
      wait(&barriers.q_empty[ring.stage()], ring.parity() ^ 1);
      load_panels<c.dim, 64>(shared.queries(ring.stage()), map, &barriers.q_full[ring.stage()],
                             first + 64 * w, turn.h, b);
      ring.advance();
    }
  });
}

/// Keys, or values: tiles from the last to the first. Arrives at `wanted` when it is through with a turn.
template <ForwardConfig c, int dim>
__device__ __forceinline__ void load_tiles(int group, const CUtensorMap& map, const SharedMemory<c>& shared,
                                           std::byte* first_smem, Mbarrier (&full)[c.stages],
                                           Mbarrier (&empty)[c.stages], Mbarrier* wanted = nullptr) {
  prefetch_map(map);
  Ring<c.stages> ring;
  for_each_turn<c>(shared, [&](const HandedTurn& turn) {
    const int h = turn.h / group;
#pragma unroll 1
    for (int n = turn.loaded.last - 1; n >= turn.loaded.first; --n) {
      wait(&empty[ring.stage()], ring.parity() ^ 1);
      load_panels<dim, c.keys>(first_smem + ring.stage() * (c.keys * dim * 2), map, &full[ring.stage()],
                               n * c.keys + (c.general ? turn.row_k : 0), h, c.general ? turn.map_b : turn.b);
      ring.advance();
    }
    if (wanted != nullptr) arrive(wanted);
  });
}

}  // namespace tilewise::cuda::wgmma
