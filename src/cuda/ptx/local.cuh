#pragma once

#include <cstdint>

namespace tilewise::cuda {

/// The same address, but opaque to the compiler: a local array that is accessed only through it is in memory
/// and takes no registers.
template <typename T>
__device__ __forceinline__ T* in_memory(T* address) {
  asm volatile("" : "+l"(address)::"memory");
  return address;
}

/// The same number, but opaque to the compiler: what depends on it is computed where it is used, and not
/// before a loop or a branch, where it would take registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ std::int64_t opaque(std::int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

/// The first lane's number. The compiler then knows that all lanes share it, and may keep it in a uniform
/// register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
__device__ __forceinline__ std::int64_t uniform(std::int64_t x) { return __shfl_sync(~0u, x, 0); }
template <typename T>
__device__ __forceinline__ T* uniform(T* x) {
  return reinterpret_cast<T*>(uniform(reinterpret_cast<std::int64_t>(x)));
}

}  // namespace tilewise::cuda
