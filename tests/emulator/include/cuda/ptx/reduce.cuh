#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

inline void add_4(float* to, float4 value) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0) emulator::fail("red.v4 at an odd address");
  atomicAdd(to, value.x);
  atomicAdd(to + 1, value.y);
  atomicAdd(to + 2, value.z);
  atomicAdd(to + 3, value.w);
}
inline void add_4_of_any_size(float* to, float4 value) { add_4(to, value); }

}  // namespace tilewise::cuda
