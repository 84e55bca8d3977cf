#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

// Code for GPUs before 8.0, or before 9.0 where said, has none of these instructions.

// Matrices of 8 x 8 elements of 16 bits: lane 4g + t has elements 2t and 2t + 1 of row g.
inline void load_matrices_emulated(std::uint32_t (&to)[4], std::uint32_t address_smem, bool turned) {
  if (__CUDA_ARCH__ < 800) emulator::fail("ldmatrix before 8.0");
  if (address_smem % 16 != 0) emulator::fail("ldmatrix from an odd address");
  const auto all = emulator::exchange(~0u, address_smem);
  const int g = emulator::self->lane / 4, t = emulator::self->lane % 4;
  for (int n = 0; n < 4; ++n) {
    std::uint16_t two[2];
    for (int i = 0; i < 2; ++i) {
      const int row = turned ? 2 * t + i : g, column = turned ? g : 2 * t + i;
      std::memcpy(two + i, emulator::shared_pointer(all[8 * n + row], 16) + 2 * column, 2);
    }
    to[n] = two[0] | static_cast<std::uint32_t>(two[1]) << 16;
  }
  emulator::exchange(~0u, 0);  // all have read
}
inline void load_matrices(std::uint32_t (&to)[4], std::uint32_t address_smem) {
  load_matrices_emulated(to, address_smem, false);
}
inline void load_matrices_transposed(std::uint32_t (&to)[4], std::uint32_t address_smem) {
  load_matrices_emulated(to, address_smem, true);
}
inline void store_matrices(std::uint32_t address_smem, const std::uint32_t (&from)[4]) {
  if (__CUDA_ARCH__ < 900) emulator::fail("stmatrix before 9.0");
  if (address_smem % 16 != 0) emulator::fail("stmatrix to an odd address");
  const auto all = emulator::exchange(~0u, address_smem);
  const int g = emulator::self->lane / 4, t = emulator::self->lane % 4;
  for (int n = 0; n < 4; ++n) {
    std::memcpy(emulator::shared_pointer(all[8 * n + g], 16) + 4 * t, &from[n], 4);
  }
  emulator::exchange(~0u, 0);  // all have written
}

template <typename T>
inline std::uint32_t pack(float low, float high);
template <>
inline std::uint32_t pack<__half>(float low, float high) {
  const __half2 two = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(two);
}
template <>
inline std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(two);
}

template <typename T>
inline float2 unpack(std::uint32_t two);
template <>
inline float2 unpack<__half>(std::uint32_t two) {
  return __half22float2(reinterpret_cast<const __half2&>(two));
}
template <>
inline float2 unpack<__nv_bfloat16>(std::uint32_t two) {
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u)};
}

template <typename T>
inline constexpr std::uint32_t two_ones = 0;
template <>
inline constexpr std::uint32_t two_ones<__half> = 0x3C003C00u;
template <>
inline constexpr std::uint32_t two_ones<__nv_bfloat16> = 0x3F803F80u;

template <typename T>
inline void multiply_matrices(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                              std::uint32_t b1) {
  if (__CUDA_ARCH__ < 800) emulator::fail("mma before 8.0");
  emulator::multiply_by_warp(c, a, {b0, b1}, std::is_same_v<T, __nv_bfloat16>);
}
template <typename T>
inline void product_of_matrices(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  c[0] = c[1] = c[2] = c[3] = 0;
  multiply_matrices<T>(c, a, b0, b1);
}

}  // namespace tilewise::cuda
