#pragma once

#include <cstdint>

namespace tilewise::cuda {

/// Loads 16 bytes that are read only once and so bypass the L1; gives zeros if not `valid`. The loads stay in
/// the order of the source: if the compiler gathered them, none would be in flight in the meantime.
__device__ __forceinline__ uint4 load_once(const void* from_gmem, bool valid) {
  uint4 to;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(to.x), "=&r"(to.y), "=&r"(to.z), "=&r"(to.w)
      : "l"(from_gmem), "r"(static_cast<std::uint32_t>(valid)));
  return to;
}

}  // namespace tilewise::cuda
