#pragma once

#include "cuda/gemm/loader.cuh"
#include "cuda/gemm/output.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace tilewise::cuda::gemm {

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
  // The kernel behind may stand by: it waits for this one's results itself.
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  __syncthreads();  // barriers are there; the last one for all

  if (warp < 4) {
    keep_registers<c.producer_registers()>();
    if (warp == 0 && elected()) Loader<c>{maps, shared}.load(arguments);
  } else {
    take_registers<c.consumer_registers()>();
    const int index = warp / 4 - 1;
    Consumer<T, c> consumer(shared, index);
    Writer<T, c> writer{maps, arguments, shared.slabs(warp - 4), static_cast<int>(threadIdx.x) % 32};
    for_each_tile<c>(arguments, [&](int first_row, int column) {
      writer.begin(first_row + index * c.consumer_rows() + warp % 4 * 16, column);
      consumer.multiply(stages_of<c>(arguments), writer);
      writer.finish(consumer.sums);
    });
    writer.end();
  }
#endif
}

}  // namespace tilewise::cuda::gemm
