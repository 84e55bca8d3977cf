#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

namespace tilewise::cuda {

// Blocks of a cluster (sm_90 on), which run together and reach each other's shared memory.

/// The block's number in its cluster.
__device__ __forceinline__ int rank_in_cluster() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

/// Arrives at the barrier that stands at the same place in another block, or in this one.
__device__ __forceinline__ void arrive_at(Mbarrier* barrier_smem, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(barrier_smem))),
      "r"(rank)
      : "memory");
#endif
}

/// All threads of the cluster's blocks that have not ended, in any order of lanes.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

}  // namespace tilewise::cuda
