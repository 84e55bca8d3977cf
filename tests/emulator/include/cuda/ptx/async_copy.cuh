#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

// On GPUs before 8.0 these are ordinary copies, which are done immediately also with
// TILEWISE_EMULATOR_LATE=1.

inline void copy_async_part(void* to_smem, const void* from_gmem, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(to_smem) % 16 != 0) emulator::fail("cp.async to an odd address");
  if (bytes > 0 && reinterpret_cast<std::uintptr_t>(from_gmem) % 16 != 0) {
    emulator::fail("cp.async from an odd address");
  }
  if constexpr (__CUDA_ARCH__ >= 800) return emulator::copy_later(to_smem, from_gmem, bytes, 16);
  std::memset(to_smem, 0, 16);
  std::memcpy(to_smem, from_gmem, static_cast<std::size_t>(bytes));
}
inline void copy_async_16(void* to_smem, const void* from_gmem, bool valid) {
  copy_async_part(to_smem, from_gmem, valid ? 16 : 0);
}
inline void copy_async_4(float* to_smem, const float* from_gmem) {
  if constexpr (__CUDA_ARCH__ >= 800) return emulator::copy_later(to_smem, from_gmem, 4, 4);
  *to_smem = *from_gmem;
}
inline void commit_copies() {
  if constexpr (__CUDA_ARCH__ >= 800) emulator::commit_copies();
}
template <int groups>
inline void wait_copies() {
  if constexpr (__CUDA_ARCH__ >= 800) emulator::wait_copies(groups);
}

}  // namespace tilewise::cuda
