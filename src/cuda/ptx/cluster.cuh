#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "cuda/ptx/mbarrier.cuh"

namespace tilewise::cuda {

// Two blocks that run at the same time on neighbouring multiprocessors and reach each other's shared memory
// (a cluster, sm_90 on; their kernel says __cluster_dims__).

/// This block's number of the two.
__device__ __forceinline__ int place_in_pair() { return static_cast<int>(blockIdx.x % 2); }

/// A barrier of all threads of both blocks. It puts nothing in order that was written before, but for the
/// inits of barriers, by their own fence.
__device__ __forceinline__ void sync_pair() {
  ::cuda::ptx::barrier_cluster_arrive(::cuda::ptx::sem_relaxed);
  ::cuda::ptx::barrier_cluster_wait();
}

/// Arrives at the barrier that stands at the same place of the shared memory of block `of` of the two. What
/// was read before, products have read: there is nothing else to put in order.
__device__ __forceinline__ void arrive_in(int of, const Mbarrier* barrier_smem) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(barrier_smem))),
      "r"(of)
      : "memory");
#endif
}

/// As copy_box, into both blocks, to the same place of either's shared memory, where the same barriers are
/// told.
__device__ __forceinline__ void copy_box_to_both(void* to_smem, const CUtensorMap& map,
                                                 Mbarrier* barrier_smem, int column, int row) {
  const std::int32_t place[2] = {column, row};
  constexpr std::uint16_t both = 0b11;
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, &map,
                                    place, barrier_smem, both);
}

}  // namespace tilewise::cuda
