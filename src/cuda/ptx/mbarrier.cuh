#pragma once

#include <cstdint>
#include <cuda/ptx>

namespace tilewise::cuda {

// Barriers in shared memory on which copies and threads arrive (sm_90 on). A barrier goes through phases: one
// ends when all its arrivals have come and all bytes that were announced to it are there. Waiting is for the
// end of a phase of a parity: the first phase has parity 0, and on a new barrier parity 1 is over already.

using Mbarrier = std::uint64_t;

__device__ __forceinline__ void init_barrier(Mbarrier* barrier_smem, int arrivals) {
  ::cuda::ptx::mbarrier_init(barrier_smem, static_cast<std::uint32_t>(arrivals));
}

/// After the first thread's inits and before a barrier of the block: copies see them too.
__device__ __forceinline__ void fence_barrier_inits() {
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
}

__device__ __forceinline__ void arrive(Mbarrier* barrier_smem) { ::cuda::ptx::mbarrier_arrive(barrier_smem); }

/// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void arrive_expecting(Mbarrier* barrier_smem, int bytes) {
  ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                         ::cuda::ptx::space_shared, barrier_smem,
                                         static_cast<std::uint32_t>(bytes));
}

/// Returns once a phase of that parity is over.
__device__ __forceinline__ void wait(Mbarrier* barrier_smem, std::uint32_t parity) {
#ifdef TILEWISE_WAIT_TRIES  // for the search for a deadlock: a wait that lasts longer ends the kernel
  for (int tries = 0; !::cuda::ptx::mbarrier_test_wait_parity(barrier_smem, parity); ++tries) {
    if (tries > TILEWISE_WAIT_TRIES) __trap();
  }
#else
  while (!::cuda::ptx::mbarrier_try_wait_parity(barrier_smem, parity)) {
  }
#endif
}

}  // namespace tilewise::cuda
