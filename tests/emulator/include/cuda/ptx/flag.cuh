#pragma once

#include <cstdint>

#include "emulator.h"
#include "races/races.h"

namespace tilewise::cuda {

inline void raise_flag(std::uint32_t* flag, std::uint32_t word) {
  emulator::races::raise(flag);
  __atomic_store_n(flag, word, __ATOMIC_RELEASE);
}
inline void await_flag(const std::uint32_t* flag, std::uint32_t word) {
  emulator::wait_for([=] { return __atomic_load_n(flag, __ATOMIC_ACQUIRE) == word; },
                     "a flag in global memory");
  emulator::races::found(flag);
}

}  // namespace tilewise::cuda
