#pragma once

#include <cstdint>

namespace tilewise::cuda {

/// The same address, of which the compiler knows nothing: a local array reached by it alone is in memory, and
/// takes no registers.
template <typename T>
__device__ __forceinline__ T* in_memory(T* address) {
  asm volatile("" : "+l"(address)::"memory");
  return address;
}

/// The same number, of which the compiler knows nothing: what follows from it is computed where it is used,
/// and not ahead of a loop or a branch, where it would take registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ std::int64_t opaque(std::int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

/// The first lane's number, of which the compiler then knows that a warp's lanes share it: it may be kept in
/// the registers that a warp has besides those of its lanes.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
__device__ __forceinline__ std::int64_t uniform(std::int64_t x) { return __shfl_sync(~0u, x, 0); }
template <typename T>
__device__ __forceinline__ T* uniform(T* x) {
  return reinterpret_cast<T*>(uniform(reinterpret_cast<std::int64_t>(x)));
}

}  // namespace tilewise::cuda
