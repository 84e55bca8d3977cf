#pragma once

#include <cstdint>

namespace tilewise::cuda {

/// 16 bytes that are read once, so that they take no place in the L1; zeros where not `valid`. Loads stay in
/// the order of the source: a compiler that gathers them leaves nothing under way meanwhile.
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
