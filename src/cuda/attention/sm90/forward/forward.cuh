#pragma once

#include "cuda/attention/sm90/forward/consumer.cuh"
#include "cuda/attention/sm90/forward/mask.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace tilewise::cuda::wgmma {

/// A barrier of the whole block whose threads come to it in two branches of a kernel, as __syncthreads has it
/// not: each side arrives at the other's barrier and waits at its own.
template <int threads>
__device__ __forceinline__ void meet_loaders() {
  arrive_some<8, threads>();
  sync_some<9, threads>();
}
template <int threads>
__device__ __forceinline__ void meet_consumers() {
  arrive_some<9, threads>();
  sync_some<8, threads>();
}

/// The number of the warp: the same in all lanes, which the compiler cannot see in threadIdx.
__device__ __forceinline__ int this_warp() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

/// Attention on tensor cores by wgmma. The first warpgroup of a block has the loaders, the others compute;
/// docs/wgmma.md draws who waits for whom. Compiled for sm_90a alone.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), 1)
    forward_kernel(const __grid_constant__ MapsOf<Table> maps,
                   const __grid_constant__ ForwardArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr ForwardConfig c = Table::rows[row];
  extern __shared__ __align__(1024) std::byte first_smem[];
  const SharedMemory<c> shared{first_smem};
  Barriers<c>& barriers = shared.barriers();
  // ptxas puts the second branch first, and there loaders belong: instructions near a kernel's beginning are
  // at hand, others are waited for. They give registers away before the block meets, so that nobody waits for
  // it.
  if (this_warp() >= 4) {
    if (this_warp() == 4 && elected()) prefetch_map(maps.k);
    if (this_warp() == 5 && elected()) prefetch_map(maps.q);
    barriers.init(this_warp());
    meet_loaders<c.threads()>();  // barriers and the first turn are there; the last one for all
    take_registers<c.consumer_registers()>();
    const int warp = this_warp();
    Consumer<T, c> consumer(arguments, maps.o, shared, warp / 4 - 1, warp % 4);
    consumer.compute_all();
  } else {
    TurnKeeper<c> turns{arguments, barriers};
    bool begun = false;
    if (this_warp() == 0) begun = begin<c>(arguments, maps.q, maps.k, shared);
    if (this_warp() == 2 && elected()) prefetch_map(maps.v);
    barriers.init(this_warp());
    if (this_warp() == 3) turns.leave_first();
    keep_registers<c.producer_registers()>();
    meet_consumers<c.threads()>();  // as above
    const int warp = this_warp();
    if (warp == 0 && elected()) {
      load_tiles<c, c.dim>(arguments.group, maps.k, shared, shared.keys(0), barriers.k_full, barriers.k_empty,
                           true, begun, [](const HandedTurn&, int) {});
    }
    if (warp == 1 && elected()) load_queries<c>(arguments, maps.q, shared);
    if (warp == 2 && elected()) {
      const auto load_values = [&](const auto& ahead) {
        load_tiles<c, c.dim_v>(arguments.group, maps.v, shared, shared.values(0), barriers.v_full,
                               barriers.v_empty, false, false, ahead);
      };
      if constexpr (c.masked) {
        MaskLoader<c> mask{arguments, maps.mask, shared};
        load_values([&](const HandedTurn& turn, int n) { mask.load(turn, n); });
      } else {
        load_values([](const HandedTurn&, int) {});
      }
    }
    if (warp == 3) turns.hand_out();
  }
#endif
}

}  // namespace tilewise::cuda::wgmma
