#pragma once

#include <cstdint>

namespace tilewise::cuda {

// Flags in global memory, by which CTAs signal each other that data has been written.

/// Stores a word with release semantics: a thread that awaits it then sees what this thread wrote, or had
/// seen, before.
__device__ __forceinline__ void raise_flag(std::uint32_t* flag, std::uint32_t word) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(word) : "memory");
}

/// Waits until the flag has that word, with acquire semantics.
__device__ __forceinline__ void await_flag(const std::uint32_t* flag, std::uint32_t word) {
  std::uint32_t found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
  } while (found != word);
}

}  // namespace tilewise::cuda
