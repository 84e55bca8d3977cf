#pragma once

#include "cuda/attention/sm90/forward/block_loaders.cuh"
#include "cuda/attention/sm90/forward/consumer.cuh"
#include "cuda/attention/sm90/forward/mask.cuh"
#include "cuda/attention/sm90/forward/odd_mask.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/runtime/dynamic_shared.cuh"

namespace tilewise::cuda::wgmma {

/// A barrier of the whole CTA for two branches of the kernel, which __syncthreads does not allow: each side
/// arrives at the other's barrier and waits at its own.
template <int threads>
__device__ __forceinline__ void meet_loaders() {
  arrive_some<loaders_may_start, threads>();
  sync_some<consumers_may_start, threads>();
}
template <int threads>
__device__ __forceinline__ void meet_consumers() {
  arrive_some<consumers_may_start, threads>();
  sync_some<loaders_may_start, threads>();
}

/// The warp's number. The shuffle tells the compiler that it is the same in all lanes.
__device__ __forceinline__ int this_warp() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

/// Attention on tensor cores by wgmma, for sm_90a alone. Warpgroup 0 of a CTA loads: warp 0 loads K, warp 1
/// Q, warp 2 V and the mask, and warp 3 is the tile scheduler. The other warpgroups are the consumers, which
/// compute. docs/wgmma.md draws who waits for whom.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), 1)
    forward_kernel(const __grid_constant__ MapsOf<Table> maps,
                   const __grid_constant__ ArgumentsOf<Table::rows[0].combined()> arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr ForwardConfig c = Table::rows[row];
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const SharedMemory<c> shared{first_smem};
  Barriers<c>& barriers = shared.barriers();
  // ptxas places the else branch first, near the kernel's beginning, where instructions are fetched soonest.
  // The loaders are there because the CTA's first copies are theirs. They give registers away before the CTA
  // meets, so that no consumer waits for them.
  if (this_warp() >= 4) {
    if (this_warp() == 4 && elected()) prefetch_map(maps.k);
    if (this_warp() == 5 && elected()) prefetch_map(maps.q);
    barriers.init(this_warp());
    meet_loaders<c.threads()>();  // mbarriers and the first work item are there; the last CTA-wide barrier
    take_registers<c.consumer_registers()>();
    const int warp = this_warp();
    Consumer<T, c> consumer(arguments, maps.o, shared, warp / 4 - 1, warp % 4);
    consumer.compute_all();
  } else {
    TileScheduler<c> scheduler{arguments, barriers};
    bool first_loaded = false;
    if (this_warp() == 0) first_loaded = load_first<c>(arguments, maps.q, maps.k, shared);
    if (this_warp() == 2 && elected()) prefetch_map(maps.v);
    barriers.init(this_warp());
    if (this_warp() == 3) scheduler.publish_first();
    keep_registers<c.producer_registers()>();
    meet_consumers<c.threads()>();  // as above
    const int warp = this_warp();
    if (warp == 0 && elected()) {
      if constexpr (c.blocks) {
        load_listed_keys<c>(arguments, maps.k, shared);
      } else {
        load_tiles<c, c.dim>(arguments.group, maps.k, shared, shared.keys(0), barriers.k_full,
                             barriers.k_empty, true, first_loaded, [](const WorkItem&, int) {});
      }
    }
    if (warp == 1 && elected()) load_queries<c>(arguments, maps.q, shared);
    const bool odd = has_odd_mask<c>(arguments);
    if constexpr (c.combined()) {
      if (warp == 2 && odd) load_values_and_odd_mask<c>(arguments, maps.v, shared);
    }
    if (warp == 2 && !odd && elected()) {
      const auto load_values = [&](const auto& ahead) {
        load_tiles<c, c.dim_v>(arguments.group, maps.v, shared, shared.values(0), barriers.v_full,
                               barriers.v_empty, false, false, ahead);
      };
      if constexpr (c.blocks) {
        load_listed_values<c>(arguments, maps.v, maps.mask, shared);
      } else if constexpr (c.masked) {
        MaskLoader<c> mask{arguments, maps.mask, shared};
        load_values([&](const WorkItem& item, int n) { mask.load(item, n); });
      } else {
        load_values([](const WorkItem&, int) {});
      }
    }
    if (warp == 3) scheduler.publish_all();
  }
#endif
}

}  // namespace tilewise::cuda::wgmma
