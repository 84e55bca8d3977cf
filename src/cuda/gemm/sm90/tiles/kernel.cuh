#pragma once

#include "cuda/gemm/sm90/tiles/loader.cuh"
#include "cuda/gemm/sm90/tiles/output.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/runtime/dynamic_shared.cuh"

namespace tilewise::cuda::gemm {

/// Waits until thread 0 has initialised the mbarriers. The loader warp, whose thread that is, does not wait
/// for the other warps to start, except in a pair, where it also loads into the other CTA.
template <GemmConfig c>
__device__ __forceinline__ void wait_for_barriers(int warp) {
  constexpr int threads = 32 + c.consumers * 128;
  if constexpr (c.pair != Pair::none) {
    sync_pair();
  } else if (warp == 0) {
    __syncwarp();
    arrive_some<1, threads>();
  } else if (warp >= 4) {
    sync_some<1, threads>();
  }
}

/// What a CTA does. docs/gemm.md says who waits for whom.
template <typename T, GemmConfig c>
__device__ __forceinline__ void multiply_tiles(const GemmMaps& maps, const GemmArguments& arguments) {
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const SharedMemory<c> shared{first_smem};
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    prefetch_map(maps.a);
    prefetch_map(maps.b);
    if constexpr (c.gated) prefetch_map(maps.gate);
    shared.barriers().init();
  }
  // PDL: the next kernel may be launched now, because it waits for this one's results itself.
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  wait_for_barriers<c>(warp);

  if (warp < 4) {
    keep_registers<c.producer_registers()>();
    if (warp == 0 && elected()) Loader<c>{maps, shared}.load(arguments);
  } else {
    take_registers<c.consumer_registers()>();
    const int index = warp / 4 - 1;
    Consumer<T, c> consumer(shared, index);
    Writer<T, c> writer{maps, arguments, shared.slabs(warp - 4), static_cast<int>(threadIdx.x) % 32};
    const auto multiply_tile = [&](int row, int column, const auto& meanwhile) {
      writer.begin(row + index * c.consumer_rows() + warp % 4 * 16, column);
      consumer.multiply(stages_of<c>(arguments), writer, meanwhile);
      writer.finish(consumer.sums);
    };
    if constexpr (c.hides_end()) {
      Tiles<c> tiles(arguments);
      if (tiles.there()) tiles.find();
#pragma unroll 1
      while (tiles.there()) {
        multiply_tile(tiles.row, tiles.column, [&] {
          tiles.advance();
          if (tiles.there()) tiles.find();
        });
      }
    } else {
      for_each_tile<c>(arguments, [&](int row, int column) { multiply_tile(row, column, [] {}); });
    }
    writer.end();
  }
  // The other CTA of a pair may still have to arrive at this one's mbarriers.
  if constexpr (c.pair != Pair::none) sync_pair();
}

/// Matrix products on tensor cores by wgmma, for sm_90a alone.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), 1)
    gemm_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  multiply_tiles<T, Table::rows[row]>(maps, arguments);
#endif
}

/// The same, with CTAs in clusters of two.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), 1) __cluster_dims__(2)
    gemm_pair_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  multiply_tiles<T, Table::rows[row]>(maps, arguments);
#endif
}

}  // namespace tilewise::cuda::gemm
