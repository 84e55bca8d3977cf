#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "cuda/ptx/mbarrier.cuh"

namespace tilewise::cuda {

// Clusters of two CTAs (from sm_90 on), which run at the same time on neighbouring SMs and can access each
// other's shared memory. Their kernel has __cluster_dims__.

/// The CTA's rank in the cluster.
__device__ __forceinline__ int rank_in_pair() { return static_cast<int>(blockIdx.x % 2); }

/// A barrier of all threads of both CTAs. It does not order earlier writes, except the initialisation of
/// mbarriers, which has a fence of its own.
__device__ __forceinline__ void sync_pair() {
  ::cuda::ptx::barrier_cluster_arrive(::cuda::ptx::sem_relaxed);
  ::cuda::ptx::barrier_cluster_wait();
}

/// Arrives at the mbarrier at the same offset in the shared memory of CTA `of` of the cluster. Only products
/// have read the stage before, so there is nothing else to order.
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

/// Like copy_box(), but multicast to both CTAs: to the same offset in the shared memory of each, signalling
/// the mbarrier at the same offset of each.
__device__ __forceinline__ void copy_box_to_both(void* to_smem, const CUtensorMap& map,
                                                 Mbarrier* barrier_smem, int column, int row) {
  const std::int32_t place[2] = {column, row};
  constexpr std::uint16_t both = 0b11;
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, &map,
                                    place, barrier_smem, both);
}

}  // namespace tilewise::cuda
