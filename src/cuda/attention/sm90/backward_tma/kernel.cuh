#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm90/backward_tma/config.h"
#include "cuda/attention/sm90/backward_tma/params.h"
#include "cuda/attention/sm90/panel_tile.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/local.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
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

enum NamedBarrier { both_consumers = 1, all_producers = 2 };

/// The keys of a CTA and the tiles of queries that see some of them.
struct Walk {
  int b, head_kv, first_key;
  int key_count;  ///< that some query may see; the others of the 128 count as hidden
  int first_tile, end_tile;
  std::int64_t position;  ///< of the first key, as queries count

  template <int queries>
  __device__ static Walk of(const Sizes& sizes, const Turns& turns, unsigned index) {
    const Turn turn = turns.turn(index);
    Walk walk{};
    walk.b = static_cast<int>(turn.head / static_cast<unsigned>(sizes.heads_kv));
    walk.head_kv = static_cast<int>(turn.head % static_cast<unsigned>(sizes.heads_kv));
    walk.first_key = static_cast<int>(turn.tile) * Config::keys;
    int length_k = sizes.length_k;
    if (sizes.key_lengths != nullptr) {
      length_k = static_cast<int>(within(sizes.key_lengths[walk.b * sizes.key_lengths_stride], 0, length_k));
    }
    walk.key_count = max(0, min(Config::keys, length_k - walk.first_key));
    walk.position = walk.first_key - (sizes.bottom_right ? std::int64_t{length_k} - sizes.length_q : 0);
    const std::int64_t first = max(std::int64_t{0}, walk.position - sizes.right);
    const std::int64_t end =
        min(static_cast<std::int64_t>(sizes.length_q), walk.position + walk.key_count + sizes.left);
    const bool any = walk.key_count > 0 && first < end;
    walk.first_tile = any ? static_cast<int>(first / queries) : 0;
    walk.end_tile = any ? static_cast<int>((end + queries - 1) / queries) : 0;
    return walk;
  }

  __device__ int tiles() const { return end_tile - first_tile; }
};

/// Query r of a tile sees keys r + low up to, not including, r + high of the CTA's.
struct Visible {
  int low, high;
  bool all;  ///< every query sees every key

  template <int queries>
  __device__ static Visible of(const Sizes& sizes, const Walk& walk, int tile) {
    constexpr std::int64_t far = 1 << 20;  // beyond any tile, and no sum of it overflows
    const std::int64_t at = std::int64_t{tile} * queries - walk.position;
    const auto low = static_cast<int>(max(-far, min(far, at - sizes.left)));
    const auto high = static_cast<int>(max(-far, min(far, at + sizes.right + 1)));
    return {low, high, low + queries - 1 <= 0 && high >= Config::keys && walk.key_count == Config::keys};
  }
};

template <Config c>
struct Shared {
  using KeyPanels = PanelTile<c.dim, c.keys>;
  using QueryPanels = PanelTile<c.dim, c.queries>;
  using DsPanels = PanelTile<c.queries, c.keys>;

  std::byte* k;      ///< [keys, dim]; in the end dK
  std::byte* v;      ///< [keys, dim]; in the end dV
  std::byte* q;      ///< stages x [queries, dim]
  std::byte* d_o;    ///< stages x [queries, dim]
  std::byte* ds;     ///< ds_stages x [keys, queries]
  float* dq;         ///< [consumer warps, warp_dq_floats]
  float* lse;        ///< stages x [queries]
  float* delta;      ///< stages x [queries]
  Mbarrier* q_full;  ///< [stages]: Q and LSE are there
  Mbarrier* d_o_full;
  Mbarrier* q_empty;  ///< [stages]: all consumers are done with them
  Mbarrier* d_o_empty;
  Mbarrier* keys_full;

  __device__ explicit Shared(std::byte* first)
      : k(first),
        v(k + c.key_bytes()),
        q(v + c.key_bytes()),
        d_o(q + c.stages * c.query_bytes()),
        ds(d_o + c.stages * c.query_bytes()),
        dq(reinterpret_cast<float*>(ds + c.ds_stages * c.ds_bytes())),
        lse(dq + c.consumer_warps * c.warp_dq_floats),
        delta(lse + c.stages * c.queries),
        q_full(reinterpret_cast<Mbarrier*>(delta + c.stages * c.queries)),
        d_o_full(q_full + c.stages),
        q_empty(d_o_full + c.stages),
        d_o_empty(q_empty + c.stages),
        keys_full(d_o_empty + c.stages) {}

  __device__ void init_barriers() const {
    for (int n = 0; n < c.stages; ++n) {
      init_barrier(q_full + n, 1);
      init_barrier(d_o_full + n, 1);
      init_barrier(q_empty + n, c.consumer_warps);
      init_barrier(d_o_empty + n, c.consumer_warps);
    }
    init_barrier(keys_full, 1);
    fence_barrier_inits();
  }
  static __device__ TileDescriptor tile(const std::byte* smem, int panel_bytes) {
    return describe_tile(static_cast<std::uint32_t>(__cvta_generic_to_shared(smem)), panel_bytes);
  }
};

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

/// K and V. Rows behind a key length are zeros, like those behind the tensor: whatever they hold must not
/// meet dS = 0.
template <Config c>
__device__ void load_keys(const TileParams& params, const Shared<c>& shared, const Walk& walk) {
  const int thread = static_cast<int>(threadIdx.x) - c.consumer_threads;
  const Sizes& sizes = params.sizes;
  const int in_tensor = min(c.keys, sizes.length_k - walk.first_key);
  if (walk.key_count == in_tensor) {
    if (thread != 0) return;
    arrive_expecting(shared.keys_full, 2 * c.key_bytes());
    for (int panel = 0; panel < c.dim / 64; ++panel) {
      const int offset = panel * Shared<c>::KeyPanels::panel_bytes;
      copy_box(shared.k + offset, params.k, shared.keys_full, 64 * panel, walk.first_key, walk.head_kv,
               walk.b);
      copy_box(shared.v + offset, params.v, shared.keys_full, 64 * panel, walk.first_key, walk.head_kv,
               walk.b);
    }
    return;
  }
  const auto copy = [&](std::byte* to, const Rows& rows, int dims) {
    copy_valid_rows<c>(to, row_of_halves(rows, walk.b, walk.head_kv, walk.first_key), rows.stride_s * 2,
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

/// Q, dO and their rows' statistics, tile by tile; by one thread.
template <Config c>
__device__ void load_queries(const TileParams& params, const Shared<c>& shared, const Walk& walk) {
  const Sizes& sizes = params.sizes;
  Ring<c.stages> at;
#pragma unroll 1
  for (int head = 0; head < sizes.group; ++head) {
    const int head_q = walk.head_kv * sizes.group + head;
    const std::int64_t first_row =
        (std::int64_t{walk.b} * sizes.heads_q + head_q) * params.workspace.tiles * c.queries;
#pragma unroll 1
    for (int tile = walk.end_tile - 1; tile >= walk.first_tile; --tile) {
      const int stage = at.stage();
      const int first = tile * c.queries;
      const auto load = [&](std::byte* to, const CUtensorMap& map, float* statistics, const float* from,
                            Mbarrier* full, Mbarrier* empty) {
        wait(empty + stage, at.parity() ^ 1);
        arrive_expecting(full + stage, c.query_bytes() + c.queries * 4);
        for (int panel = 0; panel < c.dim / 64; ++panel) {
          copy_box(to + stage * c.query_bytes() + panel * Shared<c>::QueryPanels::panel_bytes, map,
                   full + stage, 64 * panel, first, head_q, walk.b);
        }
        copy_bytes(statistics + stage * c.queries, from + first_row + first, c.queries * 4, full + stage);
      };
      load(shared.q, params.q, shared.lse, params.workspace.lse, shared.q_full, shared.q_empty);
      load(shared.d_o, params.d_o, shared.delta, params.workspace.delta, shared.d_o_full, shared.d_o_empty);
      at.advance();
    }
  }
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

  /// dQᵀ of 64 dims and 64 queries: at dim 64 the consumer's half of the queries, else its half of the dims.
  __device__ __forceinline__ void start_dq(float (&dq)[32], const std::byte* ds_smem) {
    const int key_panel = c.dim > 64 ? group : 0, ds_panel = c.dim > 64 ? 0 : group;
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
    const int chunk = c.dim > 64 ? warp : warp % 4;  // of 16 dims
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
    const std::int64_t at =
        (std::int64_t{walk.b} * params.sizes.heads_q + head_q) * params.workspace.tiles + tile;
    const std::int64_t eights = (at * (c.dim / 16) + chunk) * (c.queries / 8) + (c.dim > 64 ? 0 : 8 * group);
    add_floats(params.workspace.dq + eights * 128, from, c.warp_dq_floats * 4);
    commit_stores();
  }

  __device__ __forceinline__ void run_tile(int head_q, int tile, const Ring<c.stages>& at, int ds_stage,
                                           bool first) {
    const int stage = at.stage();
    const std::byte* q = shared.q + stage * c.query_bytes();
    const std::byte* d_o = shared.d_o + stage * c.query_bytes();
    std::byte* ds_smem = shared.ds + ds_stage * c.ds_bytes();
    const Visible visible = Visible::of<c.queries>(params.sizes, walk, tile);
    Scores s, dp;
    Fragments weights, ds;

    wait(shared.q_full + stage, at.parity());
    start_scores(s, shared.k, q);
    wait(shared.d_o_full + stage, at.parity());
    start_scores(dp, shared.v, d_o);
    wait_products<1>();  // S
    pin(s);
    if (!visible.all) hide(s, visible);
    weigh(s, shared.lse + stage * c.queries, weights);
    wait_products<0>();  // dP
    pin(dp);
    differentiate(s, dp, shared.delta + stage * c.queries, ds);
    store_ds(ds_smem, ds);
    fence_async_proxy();
    pin(weights);
    pin(ds);

    fence_products();
    start_sums(dv, weights, d_o, !first);
    // dS of both consumers is there, and both are done with dQ of the tile before, whose dS the next tile
    // overwrites.
    sync_some<both_consumers, c.consumer_threads>();
    float dq[32];
    start_dq(dq, ds_smem);
    wait_products<1>();  // dV
    arrive_once(shared.d_o_empty + stage);
    start_sums(dk, ds, q, !first);
    wait_products<1>();  // dQ
    pin(dq);
    send_dq(dq, head_q, tile);
    wait_products<0>();  // dK
    arrive_once(shared.q_empty + stage);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int n = 0; n < c.dim / 2; ++n) dk[n] = dv[n] = 0;
    Ring<c.stages> at;
    int number = 0;
#pragma unroll 1
    for (int head = 0; head < params.sizes.group; ++head) {
#pragma unroll 1
      for (int tile = walk.end_tile - 1; tile >= walk.first_tile; --tile, ++number) {
        run_tile(walk.head_kv * params.sizes.group + head, tile, at, number % c.ds_stages, number == 0);
        at.advance();
      }
    }
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
    std::byte* first = row_of_halves(rows, walk.b, walk.head_kv, walk.first_key);
    const int count = min(c.keys, params.sizes.length_k - walk.first_key);
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
    stage_rows(shared.v, dv, 1);
    sync_some<both_consumers, c.consumer_threads>();  // all rows are there
    store_rows(params.dk, params.sizes.dim_qk, shared.k);
    store_rows(params.dv, params.sizes.dim_v, shared.v);
  }
};

template <typename T, int row>
__global__ void __launch_bounds__(Config::threads, 1) tile_kernel(const __grid_constant__ TileParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr Config c = rows[row];
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const Shared<c> shared(first_smem);
  if (threadIdx.x == 0) shared.init_barriers();
  let_kernel_behind_begin();
  __syncthreads();  // barriers are there
  const Walk walk = Walk::of<c.queries>(params.sizes, params.turns, blockIdx.x);
  if (threadIdx.x >= c.consumer_threads) {
    keep_registers<c.producer_registers>();
    load_keys<c>(params, shared, walk);
    // Q, K, V and dO are older than the kernel ahead, which waited for them; the statistics are what it
    // writes.
    if (threadIdx.x != c.consumer_threads) return;
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
