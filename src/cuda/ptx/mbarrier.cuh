#pragma once

#include <cstdint>
#include <cuda/ptx>

namespace tilewise::cuda {

// Barriers in shared memory at which threads and copies arrive (from sm_90 on). A barrier goes through
// phases: a phase completes when all its arrivals and all announced bytes have come. A thread waits for the
// completion of a phase by its parity: the first phase has parity 0, and on a new barrier the phase of parity
// 1 counts as complete.

using Mbarrier = std::uint64_t;

__device__ __forceinline__ void init_barrier(Mbarrier* barrier_smem, int arrivals) {
  ::cuda::ptx::mbarrier_init(barrier_smem, static_cast<std::uint32_t>(arrivals));
}

/// Makes initialised mbarriers visible to copies, too. Called after the inits and before a barrier of the
/// CTA.
__device__ __forceinline__ void fence_barrier_inits() {
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
}

__device__ __forceinline__ void arrive(Mbarrier* barrier_smem) { ::cuda::ptx::mbarrier_arrive(barrier_smem); }

/// Arrives, and announces the bytes that copies will write.
__device__ __forceinline__ void arrive_expecting(Mbarrier* barrier_smem, int bytes) {
  ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                         ::cuda::ptx::space_shared, barrier_smem,
                                         static_cast<std::uint32_t>(bytes));
}

/// Returns when the phase of that parity is complete.
__device__ __forceinline__ void wait(Mbarrier* barrier_smem, std::uint32_t parity) {
#ifdef TILEWISE_WAIT_TRIES  // to find deadlocks: a wait that takes longer ends the kernel
  for (int tries = 0; !::cuda::ptx::mbarrier_test_wait_parity(barrier_smem, parity); ++tries) {
    if (tries > TILEWISE_WAIT_TRIES) __trap();
  }
#else
  while (!::cuda::ptx::mbarrier_try_wait_parity(barrier_smem, parity)) {
  }
#endif
}

}  // namespace tilewise::cuda
