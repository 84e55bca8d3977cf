#pragma once

#include <cstdint>

namespace tilewise::cuda {

// Asynchronous copies from global to shared memory (cp.async, from sm_80 on; ordinary copies before).

/// Copies the first `bytes` of 16, and writes zeros for the others. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_part(void* to_smem, const void* from_gmem, int bytes) {
#if __CUDA_ARCH__ >= 800
  const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(to_smem));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes));
#else
  for (int n = 0; n < 16; ++n) {
    static_cast<char*>(to_smem)[n] = n < bytes ? static_cast<const char*>(from_gmem)[n] : char{0};
  }
#endif
}

/// Copies 16 bytes, or writes zeros if not `valid`. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void* to_smem, const void* from_gmem, bool valid) {
#if __CUDA_ARCH__ >= 800
  copy_async_part(to_smem, from_gmem, valid ? 16 : 0);
#else
  *static_cast<uint4*>(to_smem) = valid ? *static_cast<const uint4*>(from_gmem) : uint4{};
#endif
}

/// Copies one float.
__device__ __forceinline__ void copy_async_4(float* to_smem, const float* from_gmem) {
#if __CUDA_ARCH__ >= 800
  const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(to_smem));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from_gmem));
#else
  *to_smem = *from_gmem;
#endif
}

/// Commits the thread's copies since the last commit as a group.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}

/// Waits until at most `groups` of this thread's groups are in flight.
template <int groups>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(groups));
#endif
}

}  // namespace tilewise::cuda
