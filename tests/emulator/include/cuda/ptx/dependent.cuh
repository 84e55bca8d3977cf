#pragma once

#include <cstdint>

#include "emulator.h"
#include "races/races.h"

namespace tilewise::cuda {

// Launches run one after the other; what would go wrong if they did not is for the race detector.
inline void wait_for_previous_kernel() { emulator::races::waited_for_kernel_ahead(); }
inline void let_next_kernel_start() { emulator::races::let_next_kernel_start(); }
inline void join_pdl_chain() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}
inline void prefetch_l2(const void*, std::uint32_t) {}

}  // namespace tilewise::cuda
