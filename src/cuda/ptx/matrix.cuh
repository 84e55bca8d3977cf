#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tilewise::cuda {

// Tensor cores by mma.sync (from sm_80 on): loads of 8 x 8 matrices of 16-bit elements from shared memory
// into fragments, and the product of a warp. With g = lane / 4 and t = lane % 4, a lane holds
//   of a, 16 x 16:  (g, 2t), (g, 2t + 1); the same of row g + 8; the same two of column + 8
//   of b, 16 x 8:   (2t, g), (2t + 1, g); the same of row + 8
//   of c, 16 x 8:   (g, 2t), (g, 2t + 1); the same of row g + 8
// A register has two elements of a or b, the first in the low half.

/// Loads four matrices whose rows of 16 bytes are at the lanes' addresses: lanes 8n to 8n + 7 have those of
/// matrix n. A lane gets elements 2t and 2t + 1 of row g of each.
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], std::uint32_t address_smem) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address_smem));
#endif
}

/// The same, transposed: a lane gets elements 2t and 2t + 1 of column g of each matrix.
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&to)[4], std::uint32_t address_smem) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address_smem));
#endif
}

#ifndef TILEWISE_NOTHING_OF_90
/// Stores four matrices (from sm_90 on): elements 2t and 2t + 1 of row g of each from every lane, to rows of
/// 16 bytes at the lanes' addresses.
__device__ __forceinline__ void store_matrices(std::uint32_t address_smem, const std::uint32_t (&from)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address_smem),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
#endif
}
#endif

/// c += a·b, accumulated in f32.
template <typename T>
__device__ __forceinline__ void multiply_matrices(float (&c)[4], const std::uint32_t (&a)[4],
                                                  std::uint32_t b0, std::uint32_t b1);
template <>
__device__ __forceinline__ void multiply_matrices<__half>(float (&c)[4], const std::uint32_t (&a)[4],
                                                          std::uint32_t b0, std::uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
template <>
__device__ __forceinline__ void multiply_matrices<__nv_bfloat16>(float (&c)[4], const std::uint32_t (&a)[4],
                                                                 std::uint32_t b0, std::uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// c = a·b.
template <typename T>
__device__ __forceinline__ void product_of_matrices(float (&c)[4], const std::uint32_t (&a)[4],
                                                    std::uint32_t b0, std::uint32_t b1);
template <>
__device__ __forceinline__ void product_of_matrices<__half>(float (&c)[4], const std::uint32_t (&a)[4],
                                                            std::uint32_t b0, std::uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
#endif
}

/// Rounds two numbers to 16 bits, the first into the low half.
template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
  const __half2 two = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(two);
}
template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(two);
}

template <typename T>
__device__ __forceinline__ float2 unpack(std::uint32_t two);
template <>
__device__ __forceinline__ float2 unpack<__half>(std::uint32_t two) {
  return __half22float2(reinterpret_cast<const __half2&>(two));
}
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(std::uint32_t two) {
#if __CUDA_ARCH__ >= 900
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(two));
#else
  return {__uint_as_float(two << 16),
          __uint_as_float(two & 0xFFFF0000u)};  // what __bfloat1622float2 compiles to on sm_90
#endif
}

/// A register with two ones.
template <typename T>
inline constexpr std::uint32_t two_ones = 0;
template <>
inline constexpr std::uint32_t two_ones<__half> = 0x3C003C00u;
template <>
inline constexpr std::uint32_t two_ones<__nv_bfloat16> = 0x3F803F80u;

}  // namespace tilewise::cuda
