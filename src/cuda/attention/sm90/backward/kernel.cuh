#pragma once

#include "cuda/attention/sm90/backward/consumer.cuh"
#include "cuda/attention/sm90/backward/producer.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/dynamic_shared.cuh"

namespace tilewise::cuda::wgmma_backward {

// A CTA keeps K and V of 128 keys and walks over the tiles of queries that see them, for all query heads of
// the group. So dK and dV stay in registers and are the same in every run. S and dP are held transposed, one
// row per key: the accumulators of S = K·Qᵀ and dP = V·dOᵀ have the layout in which P and dS are the A
// operands of dV += P·dO and dK += dS·Q. dQ sums over keys, so dS passes through shared memory. dQ is
// computed transposed, and a bulk copy adds it to f32 sums in global memory.
//
// One tile of a consumer of the plain kernel; dQ is that of the previous tile:
//   S = K·Qᵀ, dP = V·dOᵀ                  both started at once
//   P = exp2(S·c − LSE)                   while dP runs
//   dS = P ∘ (dP − delta)                 stored in shared memory, too
//   dQᵀ = Kᵀ·dSᵀ, dV += P·dO, dK += dS·Q  started; dQ is stored while dV and dK run

template <typename T, Config c, int known>
__device__ __forceinline__ void consume(const TileParams& params, const Shared<c>& shared, const Walk& walk) {
  Consumer<T, c, known> consumer(params, shared, walk);
  wait(shared.keys_full, 0);
  consumer.run();
  consumer.store_gradients();
}

/// Whether padding hides all keys of a CTA. Called by whole warps.
__device__ __forceinline__ bool hides_all_keys(const KeyMask& mask, const Walk& walk) {
  bool shows = false;
  for (int key = static_cast<int>(threadIdx.x) % 32; key < walk.key_count; key += 32)
    shows |= mask.shows(walk.entry.b, walk.first_key + key);
  return !__any_sync(~0u, shows);
}

template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), 1)
    tile_kernel(const __grid_constant__ TileParams params) {
  constexpr Config c = Table::rows[row];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const int mask_stages = params.score.mask_stages;
  const Shared<c> shared(first_smem, c.general ? mask_stages * params.score.mask_bytes(c) : 0,
                         mask_stages * c.seen_bytes());
  const bool counted = params.workspace.ticket != nullptr;
  if (threadIdx.x == 0) {
    shared.init_barriers(c.dropout_warps());
    if constexpr (c.may_drop()) {
      const DropoutMask kept = params.score.kept.drawn();
      *shared.words = {0, kept.key.low, kept.key.high, kept.stream};
    }
    if (counted) {
      wait_for_previous_kernel();  // the previous kernel clears the ticket
      shared.words->index = atomicAdd(params.workspace.ticket, 1u);
    }
  }
  let_next_kernel_start();
  __syncthreads();  // barriers and words are initialised; the last barrier of the whole CTA
  Walk walk = Walk::of<c>(params.sizes, params.turns, counted ? shared.words->index : blockIdx.x);
  if (params.sizes.packed && walk.key_count == 0) return;  // no sequence owns the keys
  if constexpr (!c.general) {
    // Padding hides all of the keys: there is nothing to add, unless other CTAs wait for their turn after
    // this.
    if (params.key_mask.data != nullptr && !counted && hides_all_keys(params.key_mask, walk))
      walk.first_tile = walk.end_tile = 0;
  }
  if (threadIdx.x >= c.consumer_threads) {
    keep_registers<c.producer_registers>();
    load_keys<c>(params, shared, walk);
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) - c.consumer_warps;
    const bool first_lane = threadIdx.x % 32 == 0;
    if constexpr (c.may_drop()) {
      constexpr int first_dropout = c.producer_warps - c.dropout_warps();
      static_assert(first_dropout > c.mask_warp);
      if (warp >= first_dropout) {
        if (params.score.dropout)
          draw_dropout<c>(params, shared, walk, warp - first_dropout, c.dropout_warps());
        return;
      }
    }
    if constexpr (c.published()) {
      if (warp == c.mask_warp) {
        if (first_lane && params.score.has_masks()) {
          wait_for_previous_kernel();  // an earlier kernel of this call may write the aligned mask
          load_masks<c>(params, shared, walk);
        }
        return;
      }
    }
    // The kernels before the previous one wrote Q, K, V and dO, and the previous one waited for them. It
    // writes the rows' values itself.
    if (!first_lane) return;
    if (warp == 1 || warp == 2) {
      wait_for_previous_kernel();  // the previous kernel clears the sums
      return add_dq_sums<c>(params, shared, walk, warp - 1);
    }
    if (warp != 0) return;
    wait_for_previous_kernel();
    return load_queries<c>(params, shared, walk);
  }
  take_registers<c.consumer_registers()>();
  if constexpr (!c.wide() || c.even()) {
    consume<T, c, -1>(params, shared, walk);
  } else if (threadIdx.x < 128) {
    consume<T, c, 0>(params, shared, walk);
  } else {
    consume<T, c, 1>(params, shared, walk);
  }
#endif
}

}  // namespace tilewise::cuda::wgmma_backward
