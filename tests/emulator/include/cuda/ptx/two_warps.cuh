#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

inline void sync_two_warps(int number) { emulator::sync_named(number, 64); }
inline bool any_of_two_warps(int number, bool value) { return emulator::any_of_named(number, 64, value); }

}  // namespace tilewise::cuda
