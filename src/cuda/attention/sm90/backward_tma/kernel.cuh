#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/sm90/backward_tma/features.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/local.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::wgmma_tma {

// A CTA keeps K and V of 128 keys and walks over the tiles of queries that see them, for all query heads of
// the group, so dK and dV stay in registers and are the same in every run. S and dP are held transposed, a
// row a key: P and dS come out of S = K·Qᵀ and dP = V·dOᵀ in the registers in which dV += P·dO and dK += dS·Q
// take them. dQ sums over keys, so dS passes through shared memory; dQ is computed transposed, and a bulk
// copy adds it to f32 sums in global memory.
//
// A tile, per consumer:
//   S = K·Qᵀ, dP = V·dOᵀ        both issued at once
//   P = exp2(S·c − LSE)         while dP runs
//   dS = P ∘ (dP − delta)       to registers and to shared memory
//   dV += P·dO                  issued; the barrier of both consumers hides behind it
//   dQᵀ = Kᵀ·dSᵀ, dK += dS·Q    issued; dQ leaves while dK runs

// The producer.

/// Fills a tile with the first `dims` elements of `valid` rows; everything else is zero. By the producer's
/// threads.
template <Config c>
__device__ void copy_valid_rows(std::byte* to_smem, const std::byte* first, std::int64_t stride, int valid,
                                int dims, int thread) {
  using Panels = typename Shared<c>::KeyPanels;
#pragma unroll 1
  for (int index = thread; index < c.keys * Panels::chunks; index += 128) {
    const int row = index / Panels::chunks, chunk = index % Panels::chunks;
    const int bytes = row < valid ? max(0, min(16, (dims - chunk * 8) * 2)) : 0;
    copy_async_part(to_smem + Panels::offset(row, chunk),
                    bytes > 0 ? first + row * stride + chunk * 16 : first, bytes);
  }
}

/// K and V. Rows behind a key length or a sequence's end are zeros, like those behind the tensor: whatever
/// they hold must not meet dS = 0.
template <Config c>
__device__ void load_keys(const TileParams& params, const Shared<c>& shared, const Walk& walk) {
  const int thread = static_cast<int>(threadIdx.x) - c.consumer_threads;
  const Sizes& sizes = params.sizes;
  const int row = walk.entry.first_k + walk.first_key;
  const std::int64_t end = sizes.packed ? sizes.starts_k.rows : sizes.length_k;
  const auto in_tensor = static_cast<int>(min(std::int64_t{c.keys}, end - row));
  if (walk.key_count == in_tensor) {
    if (thread != 0) return;
    arrive_expecting(shared.keys_full, 2 * c.key_bytes());
    for (int panel = 0; panel < c.dim / 64; ++panel) {
      const int offset = panel * Shared<c>::KeyPanels::panel_bytes;
      copy_box(shared.k + offset, params.k, shared.keys_full, 64 * panel, row, walk.head_kv,
               walk.entry.place);
      copy_box(shared.v + offset, params.v, shared.keys_full, 64 * panel, row, walk.head_kv,
               walk.entry.place);
    }
    return;
  }
  const auto copy = [&](std::byte* to, const Rows& rows, int dims) {
    copy_valid_rows<c>(to, row_of_halves(rows, walk.entry.place, walk.head_kv, row), rows.stride_s * 2,
                       walk.key_count, dims, thread);
  };
  copy(shared.k, params.k_rows, sizes.dim_qk);
  copy(shared.v, params.v_rows, sizes.dim_v);
  commit_copies();
  wait_copies<0>();
  fence_async_proxy();
  sync_some<all_producers, 128>();  // all rows are there
  if (thread == 0) arrive(shared.keys_full);
}

/// Q, dO and the values of their rows, tile by tile; by one thread.
template <Config c>
__device__ void load_queries(const TileParams& params, const Shared<c>& shared, const Walk& walk) {
  const Workspace& workspace = params.workspace;
  Ring<c.stages> at;
  for_each_tile(params.sizes, walk, [&](int head_q, int tile, int) {
    const int stage = at.stage();
    const int row = walk.entry.first_q + tile * c.queries;
    const std::int64_t values =
        (walk.entry.template first_tile<c.queries>(params.sizes, workspace.tiles, head_q) + tile) * c.queries;
    const auto load_values = [&](float* to, const float* from, Mbarrier* full) {
      copy_bytes(to + stage * c.queries, from + values, c.queries * 4, full);
    };
    const auto load = [&](std::byte* to, const CUtensorMap& map, int value_bytes, Mbarrier* full,
                          Mbarrier* empty) {
      wait(empty + stage, at.parity() ^ 1);
      arrive_expecting(full + stage, c.query_bytes() + value_bytes);
      for (int panel = 0; panel < c.dim / 64; ++panel) {
        copy_box(to + stage * c.query_bytes() + panel * Shared<c>::QueryPanels::panel_bytes, map,
                 full + stage, 64 * panel, row, head_q, walk.entry.place);
      }
    };
    load(shared.q, params.q, (c.general ? 8 : 4) * c.queries, shared.q_full, shared.q_empty);
    load_values(shared.lse, workspace.lse, shared.q_full + stage);
    if constexpr (c.general) load_values(shared.offset, workspace.offset, shared.q_full + stage);
    load(shared.d_o, params.d_o, 4 * c.queries, shared.d_o_full, shared.d_o_empty);
    load_values(shared.delta, workspace.delta, shared.d_o_full + stage);
    at.advance();
  });
}

// Consumers. Of S and dP, 64 keys x queries, lane 4g + t holds elements 4j + e: key g + 8 (e / 2) of its
// warp's 16, query 8j + 2t + e % 2.

template <typename T, Config c>
struct Consumer {
  using Scores = float[c.queries / 2];
  using Fragments = std::uint32_t[c.queries / 16][4];  ///< P or dS rounded, as the first factor of dV and dK

  const TileParams& params;
  const Shared<c>& shared;
  const Walk& walk;
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = warp / 4;
  const float unit;  ///< from S to exponents of 2
  float dk[c.dim / 2], dv[c.dim / 2];

  __device__ Consumer(const TileParams& params_, const Shared<c>& shared_, const Walk& walk_)
      : params(params_), shared(shared_), walk(walk_), unit(exponent_unit(params.scale)) {}

  /// Where the scale is 0, a number so small that it makes no difference to any product but a hidden one's.
  static __device__ float exponent_unit(float scale) {
    const float x = scale * 1.4426950408889634f;
    return fabsf(x) < 1e-30f ? 1e-30f : x;
  }

  __device__ void arrive_once(Mbarrier* barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  /// x = own 64 rows of K or V times all rows of Q or dO.
  __device__ __forceinline__ void start_scores(Scores& x, const std::byte* keys_smem,
                                               const std::byte* rows_smem) {
    const TileDescriptor a = shared.tile(keys_smem + group * 64 * 128, Shared<c>::KeyPanels::panel_bytes);
    const TileDescriptor b = shared.tile(rows_smem, Shared<c>::QueryPanels::panel_bytes);
    forget(x);
    fence_products();
#pragma unroll
    for (int step = 0; step < c.dim / 16; ++step) {
      const int inside = step % 4 * 2;
      WarpgroupProduct<T, c.queries>::from_shared(
          x, a + step / 4 * (Shared<c>::KeyPanels::panel_bytes / 16) + inside,
          b + step / 4 * (Shared<c>::QueryPanels::panel_bytes / 16) + inside, step > 0);
    }
    commit_products();
  }

  /// sums += pairs (64 keys x queries) times rows of dO or Q.
  __device__ __forceinline__ void start_sums(float (&sums)[c.dim / 2], const Fragments& pairs,
                                             const std::byte* rows_smem, bool add) {
    const TileDescriptor rows = shared.tile(rows_smem, Shared<c>::QueryPanels::panel_bytes);
#pragma unroll
    for (int step = 0; step < c.queries / 16; ++step) {
      WarpgroupProduct<T, c.dim>::from_registers(sums, pairs[step], rows + step * 128, add || step > 0);
    }
    commit_products();
  }

  /// dQᵀ of 64 dims and 64 queries: the consumer's half of the dims or of the queries, or all there is.
  __device__ __forceinline__ void start_dq(float (&dq)[32], const std::byte* ds_smem) {
    const int key_panel = c.dq_by_dims() ? group : 0;
    const int ds_panel = c.dq_by_dims() || c.dq_in_turn() ? 0 : group;
    const TileDescriptor a = shared.tile(shared.k + key_panel * Shared<c>::KeyPanels::panel_bytes,
                                         Shared<c>::KeyPanels::panel_bytes);
    const TileDescriptor b =
        shared.tile(ds_smem + ds_panel * Shared<c>::DsPanels::panel_bytes, Shared<c>::DsPanels::panel_bytes);
    forget(dq);
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
      WarpgroupProduct<T, 64>::template from_shared<1, 1>(dq, a + step * 128, b + step * 128, step > 0);
    }
    commit_products();
  }

  __device__ __forceinline__ void hide(Scores& s, const Visible& visible) const {
    const float hidden = unit > 0 ? minus_infinity : -minus_infinity;
    const int key = 16 * warp + lane / 4;
    const int query = 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < c.queries / 2; ++n) {
      const int own_key = key + n % 4 / 2 * 8;
      const int r = query + n / 4 * 8 + n % 2;
      if (own_key < r + visible.low || own_key >= r + visible.high || own_key >= walk.key_count)
        s[n] = hidden;
    }
  }

  /// P in place of S, and rounded.
  __device__ __forceinline__ void weigh(Scores& s, const float* lse_smem, Fragments& weights) const {
#pragma unroll
    for (int j = 0; j < c.queries / 8; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(lse_smem + 8 * j + 2 * (lane % 4));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[4 * j + e] = exp2_approx(fmaf(s[4 * j + e], unit, e % 2 == 0 ? -lse.x : -lse.y));
      }
      weights[j / 2][j % 2 * 2] = pack<T>(s[4 * j], s[4 * j + 1]);
      weights[j / 2][j % 2 * 2 + 1] = pack<T>(s[4 * j + 2], s[4 * j + 3]);
    }
  }
  __device__ __forceinline__ void differentiate(const Scores& p, const Scores& dp, const float* delta_smem,
                                                Fragments& ds) const {
#pragma unroll
    for (int j = 0; j < c.queries / 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(delta_smem + 8 * j + 2 * (lane % 4));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 4 * j + 2 * half;
        ds[j / 2][j % 2 * 2 + half] = pack<T>(p[n] * (dp[n] - delta.x), p[n + 1] * (dp[n + 1] - delta.y));
      }
    }
  }

  __device__ __forceinline__ void store_ds(std::byte* to_smem, const Fragments& ds) const {
#pragma unroll
    for (int step = 0; step < c.queries / 16; ++step) {
      store_matrices(static_cast<std::uint32_t>(__cvta_generic_to_shared(
                         to_smem + Shared<c>::DsPanels::offset(16 * warp + lane % 16, 2 * step + lane / 16))),
                     ds[step]);
    }
  }

  /// Has a warp's part of dQ added to the sums in global memory.
  __device__ __forceinline__ void send_dq(const float (&dq)[32], int head_q, int tile) const {
    const int chunk = c.dq_by_dims() ? warp : warp % 4;  // of 16 dims
    if (!params.wants_dq || 16 * chunk >= params.sizes.dim_qk) return;
    if (lane == 0) wait_stores_read();
    __syncwarp();  // what was there has left
    float* from = shared.dq + warp * c.warp_dq_floats;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      *reinterpret_cast<float4*>(from + 128 * j + 4 * lane) = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2],
                                                               dq[4 * j + 3]};
    }
    fence_async_proxy();
    __syncwarp();
    if (lane != 0) return;
    const Workspace& workspace = params.workspace;
    const std::int64_t at =
        walk.entry.template first_tile<c.queries>(params.sizes, workspace.tiles, head_q) + tile;
    const int half = c.dq_by_dims() || c.dq_in_turn() ? 0 : group;  // of the queries
    const std::int64_t eights = (at * (c.dim / 16) + chunk) * (c.queries / 8) + 8 * half;
    std::uint32_t* added = workspace.added == nullptr ? nullptr : workspace.added + at * 8 + 4 * half + chunk;
    const std::uint32_t rank = added == nullptr ? 0 : walk.template rank<c.queries>(params.sizes, tile);
    if (added != nullptr) await_flag(added, rank);
    add_floats(workspace.dq + eights * 128, from, c.warp_dq_floats * 4);
    commit_stores();
    if (added == nullptr) return;
    wait_stores();  // the next CTA adds to what is there then
    __threadfence();
    raise_flag(added, rank + 1);
  }

  /// Rows past a packed sequence's end belong to another one. Whatever they hold must not meet P = 0.
  __device__ __forceinline__ void clear_rows_past_end(const std::byte* q, const std::byte* d_o,
                                                      int tile) const {
    const int valid = walk.entry.length_q - tile * c.queries;
    if (!params.sizes.packed || valid >= c.queries) return;
    constexpr int chunks = Shared<c>::QueryPanels::chunks;
    for (int index = static_cast<int>(threadIdx.x); index < (c.queries - valid) * chunks;
         index += c.consumer_threads) {
      const int at = Shared<c>::QueryPanels::offset(valid + index / chunks, index % chunks);
      *reinterpret_cast<uint4*>(const_cast<std::byte*>(q) + at) = {};
      *reinterpret_cast<uint4*>(const_cast<std::byte*>(d_o) + at) = {};
    }
    fence_async_proxy();
    sync_some<both_consumers, c.consumer_threads>();  // both have cleared their part
  }

  /// P from S by the general rules. Returns the pairs that dropout keeps.
  __device__ __forceinline__ std::uint32_t weigh_with_features(Scores& s, Fragments& weights,
                                                               const Visible& visible, int head_q, int tile,
                                                               int stage, int n) const {
    const ScoreParams& score = params.score;
    std::uint32_t kept = ~0u;
    if (score.dropout) {
      const FewStages at(n, score.kept_stages);
      wait(shared.kept_full + at.stage, at.parity);
      kept = kept_pairs<c>(shared, at.stage, warp, lane);
      arrive_once(shared.kept_empty + at.stage);
    }
    const Entry& entry = walk.entry;
    const TileFacts<c> facts{
        .shared = shared,
        .score = score,
        .warp = warp,
        .lane = lane,
        .eight_rows = score.mask_rows == 64 ? 8 * 128 : 0,
        .slope = score.alibi ? static_cast<float>(score.alibi_slopes.at(entry.b, head_q)) : 0.0f,
        .distance = tile * c.queries + lane % 4 * 2 + entry.length_k - entry.length_q -
                    (walk.first_key + 16 * warp + lane / 4),
        .visible = visible,
        .key_count = walk.key_count};
    if (score.mask == MaskForm::none) {
      weigh_general<T, MaskForm::none, c>(s, weights, facts, stage, kept);
      return kept;
    }
    wait(shared.mask_full, FewStages(n, 1).parity);
    if (score.mask == MaskForm::boolean) {
      weigh_general<T, MaskForm::boolean, c>(s, weights, facts, stage, kept);
    } else if (score.mask == MaskForm::half) {
      weigh_general<T, MaskForm::half, c>(s, weights, facts, stage, kept);
    } else {
      weigh_general<T, MaskForm::single, c>(s, weights, facts, stage, kept);
    }
    arrive_once(shared.mask_empty);
    return kept;
  }

  /// Tile n of the walk.
  __device__ __forceinline__ void run_tile(int head_q, int tile, int n, const Ring<c.stages>& at) {
    const int stage = at.stage();
    const std::byte* q = shared.q + stage * c.query_bytes();
    const std::byte* d_o = shared.d_o + stage * c.query_bytes();
    std::byte* ds_smem = shared.ds + n % c.ds_stages * c.ds_bytes();
    const Visible visible = Visible::of<c.queries>(params.sizes, walk, tile);
    const bool has_dq = !c.dq_in_turn() || n % 2 == group;
    Scores s, dp;
    Fragments weights, ds;

    wait(shared.q_full + stage, at.parity());
    if (params.sizes.packed) {
      wait(shared.d_o_full + stage, at.parity());
      clear_rows_past_end(q, d_o, tile);
    }
    start_scores(s, shared.k, q);
    wait(shared.d_o_full + stage, at.parity());
    const float* delta_smem = shared.delta + stage * c.queries;
    if constexpr (c.general) {
      // Beside the rules of scores there are no registers for dP. It is computed together with dV.
      wait_products<0>();  // S
      pin(s);
      const std::uint32_t kept = weigh_with_features(s, weights, visible, head_q, tile, stage, n);
      pin(weights);
      start_scores(dp, shared.v, d_o);
      start_sums(dv, weights, d_o, n > 0);
      wait_products<1>();  // dP
      pin(dp);
      const MaskGradient dmask(params.score.dmask, walk, head_q, tile * c.queries, warp, lane);
      if (params.score.dmask.data == nullptr) {
        differentiate_general<T, false, c>(ds, s, dp, delta_smem, kept, params.dv_scale, dmask, lane);
      } else {
        differentiate_general<T, true, c>(ds, s, dp, delta_smem, kept, params.dv_scale, dmask, lane);
      }
      store_ds(ds_smem, ds);
      fence_async_proxy();
      pin(ds);
      fence_products();
    } else {
      start_scores(dp, shared.v, d_o);
      wait_products<1>();  // S
      pin(s);
      if (!visible.all) hide(s, visible);
      weigh(s, shared.lse + stage * c.queries, weights);
      wait_products<0>();  // dP
      pin(dp);
      differentiate(s, dp, delta_smem, ds);
      store_ds(ds_smem, ds);
      fence_async_proxy();
      pin(weights);
      pin(ds);
      fence_products();
      start_sums(dv, weights, d_o, n > 0);
    }
    // dS of both consumers is there, and both are done with dQ of the tile before, whose dS the next tile
    // overwrites.
    sync_some<both_consumers, c.consumer_threads>();
    float dq[32];
    if (has_dq) {
      start_dq(dq, ds_smem);
    } else {
      commit_products();  // a group without products, so that both consumers count alike
    }
    wait_products<1>();  // dV
    arrive_once(shared.d_o_empty + stage);
    start_sums(dk, ds, q, n > 0);
    wait_products<1>();  // dQ
    if (has_dq) {
      pin(dq);
      send_dq(dq, head_q, tile);
    }
    wait_products<0>();  // dK
    arrive_once(shared.q_empty + stage);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int n = 0; n < c.dim / 2; ++n) dk[n] = dv[n] = 0;
    Ring<c.stages> at;
    for_each_tile(params.sizes, walk, [&](int head_q, int tile, int n) {
      run_tile(head_q, tile, n, at);
      at.advance();
    });
    pin(dk);
    pin(dv);
    if (lane == 0) wait_stores();
  }

  /// A consumer's 64 rows of dK or dV to shared memory, rounded.
  __device__ __forceinline__ void stage_rows(std::byte* to_smem, const float (&sums)[c.dim / 2],
                                             float factor) const {
#pragma unroll
    for (int n = 0; n < c.dim / 4; ++n) {  // pairs of dims
      const int row = 16 * warp + lane / 4 + n % 2 * 8;
      *reinterpret_cast<std::uint32_t*>(to_smem + Shared<c>::KeyPanels::offset(row, n / 2) + 4 * (lane % 4)) =
          pack<T>(sums[2 * n] * factor, sums[2 * n + 1] * factor);
    }
  }
  __device__ void store_rows(const Rows& rows, int dims, const std::byte* from_smem) const {
    using Panels = typename Shared<c>::KeyPanels;
    if (!rows.wanted) return;
    std::byte* first =
        row_of_halves(rows, walk.entry.place, walk.head_kv, walk.entry.first_k + walk.first_key);
    const int count = walk.written(params.sizes);
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x); index < c.keys * Panels::chunks;
         index += c.consumer_threads) {
      const int row = index / Panels::chunks, chunk = index % Panels::chunks;
      if (row >= count || chunk * 8 >= dims) continue;
      *reinterpret_cast<uint4*>(first + row * rows.stride_s * 2 + chunk * 16) =
          *reinterpret_cast<const uint4*>(from_smem + Panels::offset(row, chunk));
    }
  }
  __device__ __forceinline__ void store_gradients() const {
    sync_some<both_consumers, c.consumer_threads>();  // nobody reads K and V any more
    stage_rows(shared.k, dk, params.scale);
    stage_rows(shared.v, dv, params.dv_scale);
    sync_some<both_consumers, c.consumer_threads>();  // all rows are there
    store_rows(params.dk, params.sizes.dim_qk, shared.k);
    store_rows(params.dv, params.sizes.dim_v, shared.v);
  }
};

template <typename T, int row>
__global__ void __launch_bounds__(Config::threads, 1) tile_kernel(const __grid_constant__ TileParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr Config c = rows[row];
  constexpr int drawing_warps = 2;
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const Shared<c> shared(first_smem, c.general ? params.score.mask_bytes() : 0);
  const bool counted = params.workspace.ticket != nullptr;
  if (threadIdx.x == 0) {
    shared.init_barriers(drawing_warps);
    if constexpr (c.general) {
      const DropoutMask kept = params.score.kept.drawn();
      *shared.words = {0, kept.key.low, kept.key.high, kept.stream};
    }
    if (counted) {
      wait_for_kernel_ahead();  // which clears the ticket
      shared.words->index = atomicAdd(params.workspace.ticket, 1u);
    }
  }
  let_kernel_behind_begin();
  __syncthreads();  // barriers and words are there
  const Walk walk =
      Walk::of<c.queries>(params.sizes, params.turns, counted ? shared.words->index : blockIdx.x);
  if (params.sizes.packed && walk.key_count == 0) return;  // keys of no sequence
  if (threadIdx.x >= c.consumer_threads) {
    keep_registers<c.producer_registers>();
    load_keys<c>(params, shared, walk);
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) - c.consumer_warps;
    const bool first_lane = threadIdx.x % 32 == 0;
    if constexpr (c.general) {
      if (warp >= 2) {
        if (params.score.dropout) draw_kept<c>(params, shared, walk, warp - 2, drawing_warps);
        return;
      }
      if (warp == 1) {
        if (first_lane && params.score.mask != MaskForm::none) load_masks<c>(params, shared, walk);
        return;
      }
    }
    // Q, K, V, dO and masks are older than the kernel ahead, which waited for them; the rows' values are what
    // it writes.
    if (warp != 0 || !first_lane) return;
    wait_for_kernel_ahead();
    load_queries<c>(params, shared, walk);
    return;
  }
  take_registers<c.consumer_registers>();
  Consumer<T, c> consumer(params, shared, walk);
  wait(shared.keys_full, 0);
  consumer.run();
  consumer.store_gradients();
#endif
}

}  // namespace tilewise::cuda::wgmma_tma
