#pragma once

#include <cstdint>

namespace tilewise::cuda {

// Loads from shared memory by its own addresses, of 32 bits, which may be sums and exclusive ors of anything.

/// Two bytes that lie together, the first in the low eight bits.
__device__ __forceinline__ std::uint32_t load_two_bytes(std::uint32_t address_smem) {
  std::uint16_t both;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both) : "r"(address_smem) : "memory");
  return both;
}

__device__ __forceinline__ float2 load_two_floats(std::uint32_t address_smem) {
  float2 both;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(both.x), "=f"(both.y)
               : "r"(address_smem)
               : "memory");
  return both;
}

}  // namespace tilewise::cuda
