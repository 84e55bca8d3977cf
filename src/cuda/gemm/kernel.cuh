#pragma once

#include "cuda/gemm/loader.cuh"
#include "cuda/gemm/output.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace tilewise::cuda::gemm {

/// Where consumers have tiles in turns: one begins when the last products of the other have begun. Then all
/// stages before its own have been full, and a stage's parity says what it asks for.
template <GemmConfig c>
struct Turns {
  static_assert(!c.turns || (c.consumers == 2 && !c.wide));
  const int index;

  /// Whether the block's tile of that number is the consumer's.
  __device__ __forceinline__ bool has(int tile) const { return !c.turns || tile % c.consumers == index; }
  __device__ __forceinline__ void wait_for(int tile) const {
    if constexpr (c.turns) {
      if (tile > 0) index == 0 ? sync_some<1, 256>() : sync_some<2, 256>();
    }
  }
  /// To the consumer of the block's next tile, if there is one.
  __device__ __forceinline__ void pass_on(int next, int total) const {
    if constexpr (c.turns) {
      if (static_cast<int>(blockIdx.x) + next * static_cast<int>(gridDim.x) < total) {
        index == 0 ? arrive_some<2, 256>() : arrive_some<1, 256>();
      }
    }
  }
};

/// Products of matrices on tensor cores by wgmma; docs/gemm.md says who waits for whom. Compiled for sm_90a
/// alone.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), 1)
    gemm_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr GemmConfig c = Table::rows[row];
  extern __shared__ __align__(1024) std::byte first_smem[];
  const SharedMemory<c> shared{first_smem};
  // The same in all lanes, which the compiler cannot see in threadIdx.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) shared.barriers().init();
  __syncthreads();  // barriers are there; the last one for all

  if (warp < 4) {
    keep_registers<c.producer_registers()>();
    if (warp == 0 && elected()) Loader<c>{maps, shared}.load(arguments);
  } else {
    take_registers<c.consumer_registers()>();
    const int index = warp / 4 - 1;
    Consumer<T, c> consumer(shared, index);
    Writer<T, c> writer{maps, arguments, shared.slabs(warp - 4), static_cast<int>(threadIdx.x) % 32};
    const int own_row = (c.turns ? 0 : index * c.consumer_rows()) + warp % 4 * 16;
    const Turns<c> turns{index};
    int tile = 0;
    for_each_tile<c>(arguments, [&](int first_row, int column) {
      if (!turns.has(tile++)) {
        consumer.ring.advance(stages_of<c>(arguments));  // another consumer's
        return;
      }
      writer.begin(first_row + own_row, column);
      turns.wait_for(tile - 1);
      consumer.multiply(stages_of<c>(arguments), [&] { turns.pass_on(tile, arguments.order.total()); });
      writer.finish(consumer.sums);
    });
    writer.end();
  }
#endif
}

}  // namespace tilewise::cuda::gemm
