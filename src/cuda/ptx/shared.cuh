#pragma once

#include <cstdint>

namespace tilewise::cuda {

// Loads by 32-bit addresses of shared memory, which may be computed by sums and exclusive ors.

__device__ __forceinline__ std::uint32_t load_byte(std::uint32_t address_smem) {
  std::uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address_smem) : "memory");
  return byte;
}

__device__ __forceinline__ float load_float(std::uint32_t address_smem) {
  float one;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(address_smem) : "memory");
  return one;
}

/// Loads two neighbouring bytes, the first into the low eight bits.
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

// The same, but not volatile: the compiler may move these loads ahead of other accesses, except across
// pin_address().

/// Keeps loads by this address behind the memory accesses before this call.
__device__ __forceinline__ void pin_address(std::uint32_t& address_smem) {
  asm volatile("" : "+r"(address_smem)::"memory");
}

__device__ __forceinline__ uint4 load_pinned_16(std::uint32_t address_smem) {
  uint4 all;
  asm("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(all.x), "=r"(all.y), "=r"(all.z), "=r"(all.w)
      : "r"(address_smem));
  return all;
}
__device__ __forceinline__ float2 load_pinned_8(std::uint32_t address_smem) {
  float2 both;
  asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(both.x), "=f"(both.y) : "r"(address_smem));
  return both;
}
__device__ __forceinline__ float load_pinned_4(std::uint32_t address_smem) {
  float one;
  asm("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(address_smem));
  return one;
}

}  // namespace tilewise::cuda
