#pragma once

#include <cstdint>

#include "emulator.h"
#include "races/races.h"

namespace tilewise::cuda {

using Mbarrier = std::uint64_t;

inline void init_barrier(Mbarrier* barrier_smem, int arrivals) {
  emulator::mbarrier_init(barrier_smem, static_cast<std::uint32_t>(arrivals));
}
inline void fence_barrier_inits() { emulator::races::fence_async_proxy(); }
inline void arrive(Mbarrier* barrier_smem) { emulator::mbarrier_arrive(barrier_smem, 0); }
inline void arrive_expecting(Mbarrier* barrier_smem, int bytes) {
  emulator::mbarrier_arrive(barrier_smem, static_cast<std::uint32_t>(bytes));
}
inline void wait(Mbarrier* barrier_smem, std::uint32_t parity) {
  emulator::mbarrier_wait(barrier_smem, parity);
}

}  // namespace tilewise::cuda
