#pragma once

#include "cuda/attention/sm90/forward/turns.cuh"
#include "cuda/ptx/tensor_copy.cuh"

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

/// A turn's queries, from those of consumer `w` on, each consumer's to the next place.
template <ForwardConfig c>
__device__ __forceinline__ void load_queries_of_turn(const ForwardArguments& arguments,
                                                     const CUtensorMap& map, const SharedMemory<c>& shared,
                                                     const HandedTurn& turn, Ring<c.query_places>& ring,
                                                     int w) {
  Barriers<c>& barriers = shared.barriers();
  const int heads_log2 = c.few ? arguments.few.heads_log2 : 0;
#pragma unroll 1
  for (; w < c.consumers; ++w) {
    wait(&barriers.q_empty[ring.stage()], ring.parity() ^ 1);
    load_rows<c>(shared.queries(ring.stage()), map, &barriers.q_full[ring.stage()],
                 first_row_of<c>(arguments, turn, w), heads_log2, turn);
    ring.advance();
  }
}

/// The block's first turn, by the warp that loads keys; false where there is nothing to load for it.
template <ForwardConfig c>
__device__ __forceinline__ bool find_first(const ForwardArguments& arguments, HandedTurn& turn) {
  if (c.general) return false;  // its entries are read from memory, by one warp
  if (!find_tile<c>(arguments, static_cast<int>(blockIdx.x), turn)) return false;
  turn.loaded = tiles_of_turn<c>(arguments, turn);
  return turn.loaded.count() > 0;
}

/// Asks for what a block needs first, the queries and keys of its first scores, before its other warps are
/// there; true where there is such. Where long and short rows are mixed, only the first consumer's queries
/// see these keys: the others' come later.
template <ForwardConfig c>
__device__ __forceinline__ bool begin(const ForwardArguments& arguments, const CUtensorMap& map_q,
                                      const CUtensorMap& map_k, const SharedMemory<c>& shared) {
  Barriers<c>& barriers = shared.barriers();
  barriers.init_first();
  HandedTurn turn{};
  if (!find_first<c>(arguments, turn)) return false;
  __syncwarp();  // barriers are there
  if (elected()) {
    const auto load_queries_of = [&](int w) {
      load_rows<c>(shared.queries(w), map_q, &barriers.q_full[w], first_row_of<c>(arguments, turn, w), 0,
                   turn);
    };
    load_queries_of(0);
    load_panels<c.dim, c.keys>(shared.keys(0), map_k, &barriers.k_full[0], (turn.loaded.last - 1) * c.keys,
                               arguments.group == 1 ? turn.h : quotient(turn.h, arguments.group), turn.b);
    if (!arguments.schedule.mixed) {
#pragma unroll 1
      for (int w = 1; w < c.consumers; ++w) load_queries_of(w);
    }
  }
  return true;
}

/// All but what begin() asked for.
template <ForwardConfig c>
__device__ __forceinline__ void load_queries(const ForwardArguments& arguments, const CUtensorMap& map,
                                             const SharedMemory<c>& shared) {
  Ring<c.query_places> ring;
  bool begun = !c.general;  // of the first turn, if there was something to load for it
  for_each_turn<c>(shared, [&](const HandedTurn& turn) {
    int w = 0;
    if (begun && turn.loaded.count() > 0) {
      w = arguments.schedule.mixed ? 1 : c.consumers;
      for (int n = 0; n < w; ++n) ring.advance();
      if (w < c.consumers) wait(&shared.barriers().keys_came, 0);
    }
    begun = false;
    if (turn.loaded.count() == 0 || w == c.consumers) return;
    if (c.query_places < 2 * c.consumers && !c.few) {  // places are free late: have them near by then
      const int b = c.general ? turn.map_b : turn.b;
      for (int panel = 0; panel < c.dim / 64; ++panel) {
        for (int n = w; n < c.consumers; ++n) {
          const int first = first_row_of<c>(arguments, turn, n) + (c.general ? turn.row_q : 0);
          prefetch_box(map, panel * 64, first, turn.h, b);
        }
      }
    }
    load_queries_of_turn<c>(arguments, map, shared, turn, ring, w);
  });
}

/// Keys, or values: tiles from the last to the first. That of keys arrives at
/// `turn_wanted` when it is through with a turn. `ahead` is called with a turn and a tile before it waits for
/// a place for the tile.
template <ForwardConfig c, int dim, typename Ahead>
__device__ __forceinline__ void load_tiles(int group, const CUtensorMap& map, const SharedMemory<c>& shared,
                                           std::byte* first_smem, Mbarrier (&full)[c.stages],
                                           Mbarrier (&empty)[c.stages], bool keys, bool begun,
                                           const Ahead& ahead) {
  Barriers<c>& barriers = shared.barriers();
  Ring<c.stages> ring;
  bool first = true;  // the block's first keys come before all else but its queries
  for_each_turn<c>(shared, [&](const HandedTurn& turn) {
    const int h = quotient(turn.h, group);
#pragma unroll 1
    for (int n = turn.loaded.last - 1; n >= turn.loaded.first; --n) {
      if (first && !keys) wait(&barriers.keys_came, 0);
      ahead(turn, n);
      if (!begun) {
        wait(&empty[ring.stage()], ring.parity() ^ 1);
        load_panels<dim, c.keys>(first_smem + ring.stage() * (c.keys * dim * 2), map, &full[ring.stage()],
                                 n * c.keys + (c.general ? turn.row_k : 0), h,
                                 c.general ? turn.map_b : turn.b);
      }
      begun = false;
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
