#pragma once

#include "cuda/attention/sm90/backward/features.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/tile/ring.cuh"

namespace tilewise::cuda::wgmma_backward {

/// Number of threads that load K and V.
template <Config c>
inline constexpr int loading_threads = 32 * c.producer_warps;

/// Fills a tile with the first `dims` elements of `valid` rows, and with zeros elsewhere. Called by the
/// loading_threads.
template <typename Panels, Config c>
__device__ void copy_valid_rows(std::byte* to_smem, const std::byte* first, std::int64_t stride, int valid,
                                int dims, int thread) {
#pragma unroll 1
  for (int index = thread; index < c.keys * Panels::chunks; index += loading_threads<c>) {
    const int row = index / Panels::chunks, chunk = index % Panels::chunks;
    const int bytes = row < valid ? max(0, min(16, (dims - chunk * 8) * 2)) : 0;
    copy_async_part(to_smem + Panels::offset(row, chunk),
                    bytes > 0 ? first + row * stride + chunk * 16 : first, bytes);
  }
}

/// Loads K and V. Rows past a key length or a sequence's end become zeros, as TMA makes those past the
/// tensor's end: dS is 0 there, but the rows may hold infinity or NaN, and 0 times these is NaN.
template <Config c>
__device__ void load_keys(const TileParams& params, const Shared<c>& shared, const Walk& walk) {
  const int thread = static_cast<int>(threadIdx.x) - c.consumer_threads;
  const Sizes& sizes = params.sizes;
  const int row = walk.entry.first_k + walk.first_key, head_kv = walk.head_kv(sizes);
  const std::int64_t end = sizes.packed ? sizes.starts_k.rows : sizes.length_k;
  const auto in_tensor = static_cast<int>(min(std::int64_t{c.keys}, end - row));
  if (walk.key_count == in_tensor) {
    if (thread != 0) return;
    arrive_expecting(shared.keys_full, c.k_bytes() + c.v_bytes());
    const auto copy = [&](std::byte* to, const CUtensorMap& map, int panels) {
      for (int panel = 0; panel < panels; ++panel) {
        copy_box(to + panel * Shared<c>::KeyPanels::panel_bytes, map, shared.keys_full, 64 * panel, row,
                 head_kv, walk.entry.place);
      }
    };
    copy(shared.k, params.k, c.panels());
    copy(shared.v, params.v, c.panels_v());
    return;
  }
  const auto first = [&](const Rows& rows) { return row_of_halves(rows, walk.entry.place, head_kv, row); };
  copy_valid_rows<typename Shared<c>::KeyPanels, c>(
      shared.k, first(params.k_rows), params.k_rows.stride_s * 2, walk.key_count, sizes.dim_qk, thread);
  copy_valid_rows<typename Shared<c>::ValuePanels, c>(
      shared.v, first(params.v_rows), params.v_rows.stride_s * 2, walk.key_count, sizes.dim_v, thread);
  commit_copies();
  wait_copies<0>();
  fence_async_proxy();
  sync_some<all_producers, loading_threads<c>>();  // all threads' rows have arrived
  if (thread == 0) arrive(shared.keys_full);
}

/// Loads Q, dO and the values of their rows, tile by tile. Called by one thread. With features and block
/// masks it publishes each tile as a Step in shared memory, since consumers have too few registers to find
/// the tiles themselves.
template <Config c>
__device__ void load_queries(const TileParams& params, const Shared<c>& shared, const Walk& walk) {
  const Workspace& workspace = params.workspace;
  Ring<c.q_stages> q_at;
  Ring<c.d_o_stages> d_o_at;
  for_each_tile<c>(params, walk, [&](const Step& step) {
    const int head_q = step.head_q, tile = step.tile;
    const int row = walk.entry.first_q + tile * c.queries;
    const std::int64_t values =
        (walk.entry.template first_tile<c.queries>(params.sizes, workspace.tiles, head_q) + tile) * c.queries;
    const auto load = [&](std::byte* to, const CUtensorMap& map, int panels, int value_bytes, Mbarrier* full,
                          Mbarrier* empty, std::uint32_t parity) {
      wait(empty, parity ^ 1);
      arrive_expecting(full, panels * Shared<c>::QueryPanels::panel_bytes + value_bytes);
      for (int panel = 0; panel < panels; ++panel) {
        copy_box(to + panel * Shared<c>::QueryPanels::panel_bytes, map, full, 64 * panel, row, head_q,
                 walk.entry.place);
      }
    };
    const int q = q_at.stage(), d_o = d_o_at.stage();
    if constexpr (c.published()) {
      wait(shared.q_empty + q, q_at.parity() ^ 1);
      shared.steps[q] = step;
      shared.visible[q] = Visible::of<c>(params.sizes, walk, tile);
    }
    load(shared.q + q * c.q_bytes(), params.q, c.panels(), (c.general ? 8 : 4) * c.queries, shared.q_full + q,
         shared.q_empty + q, q_at.parity());
    copy_bytes(shared.lse + q * c.queries, workspace.lse + values, c.queries * 4, shared.q_full + q);
    if constexpr (c.general) {
      copy_bytes(shared.offset + q * c.queries, workspace.offset + values, c.queries * 4, shared.q_full + q);
    }
    load(shared.d_o + d_o * c.d_o_bytes(), params.d_o, c.panels_v(), 4 * c.queries, shared.d_o_full + d_o,
         shared.d_o_empty + d_o, d_o_at.parity());
    copy_bytes(shared.delta + d_o * c.queries, workspace.delta + values, c.queries * 4,
               shared.d_o_full + d_o);
    q_at.advance();
    d_o_at.advance();
  });
  if constexpr (c.published()) {  // the end of the walk, too
    wait(shared.q_empty + q_at.stage(), q_at.parity() ^ 1);
    shared.steps[q_at.stage()].tile = -1;
    arrive(shared.q_full + q_at.stage());
  }
}

/// Adds a consumer's dQ of each tile to the sums in global memory. Called by one producer thread per
/// consumer.
template <Config c>
__device__ void add_dq_sums(const TileParams& params, const Shared<c>& shared, const Walk& walk, int group) {
  const Workspace& workspace = params.workspace;
  std::uint32_t parity = 0;
  const int half = c.dq_by_queries() ? group : 0;
  const int at_once = c.wide() ? c.dq_panels_at_once(group) : 1;
  const int first_panel = c.wide() ? c.first_dq_panel(group) : c.dim > 64 ? group : 0;
  const int rounds = c.wide() ? c.dq_panels(group) / at_once : 1;
  const float* from = shared.dq + group * (4 * c.warp_dq_floats());
  for_each_tile<c>(params, walk, [&](const Step& step) {
    const std::int64_t at =
        walk.entry.template first_tile<c.queries>(params.sizes, workspace.tiles, step.head_q) + step.tile;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int chunk = 4 * (first_panel + round * at_once);
      const int chunks = min(4 * at_once, (params.sizes.dim_qk + 15) / 16 - chunk);
      wait(shared.dq_full + group, parity);
      parity ^= 1;
      if (params.wants_dq && chunks > 0) {
        std::uint32_t* added = workspace.added == nullptr
                                   ? nullptr
                                   : workspace.added + at * c.dq_chunks() + c.dim / 16 * half + chunk;
        std::uint32_t rank = 0;
        if (added != nullptr) {
          rank = walk.template rank_in_walk<c>(params.sizes, params.score.blocks, step.head_q, step.tile);
          await_flag(added, rank);
        }
        add_floats(workspace.dq + at * (c.dim * c.queries) + c.dq_offset(half, chunk), from,
                   chunks * c.warp_dq_floats() * 4);
        commit_stores();
        if (added != nullptr) {
          wait_stores();  // the sums must be complete before the next CTA in order adds to them
          __threadfence();
          raise_flag(added, rank + 1);
        } else {
          wait_stores_read();
        }
      }
      arrive(shared.dq_empty + group);
    }
  });
  wait_stores();
}

}  // namespace tilewise::cuda::wgmma_backward
