#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

inline void raise_flag(std::uint32_t* flag, std::uint32_t word) {
  __atomic_store_n(flag, word, __ATOMIC_RELEASE);
}
inline void await_flag(const std::uint32_t* flag, std::uint32_t word) {
  emulator::wait_for([=] { return __atomic_load_n(flag, __ATOMIC_ACQUIRE) == word; },
                     "a flag in global memory");
}

}  // namespace tilewise::cuda
