#pragma once

namespace tilewise::cuda {

/// The same address, of which the compiler knows nothing: a local array reached by it alone is in memory, and
/// takes no registers.
template <typename T>
__device__ __forceinline__ T* in_memory(T* address) {
  asm volatile("" : "+l"(address)::"memory");
  return address;
}

}  // namespace tilewise::cuda
