#pragma once

#include <cstdint>

namespace tilewise::cuda {

// Words in global memory by which blocks tell each other that something has been written.

/// What this thread wrote before, or saw others write, is to be seen by whoever finds the word.
__device__ __forceinline__ void raise_flag(std::uint32_t* flag, std::uint32_t word) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(word) : "memory");
}

/// Waits for it.
__device__ __forceinline__ void await_flag(const std::uint32_t* flag, std::uint32_t word) {
  std::uint32_t found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
  } while (found != word);
}

}  // namespace tilewise::cuda
