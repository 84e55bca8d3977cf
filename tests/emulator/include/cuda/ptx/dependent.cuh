#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

// Launches run one after the other.
inline void wait_for_kernel_ahead() {}
inline void let_kernel_behind_begin() {}
inline void take_turn_in_chain() {}
inline void prefetch_l2(const void*, std::uint32_t) {}

}  // namespace tilewise::cuda
