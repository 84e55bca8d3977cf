#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "tilewise/dtype.h"

namespace tilewise::cuda {

// Storage types on the device: float, __half, __nv_bfloat16. Arithmetic is f32.

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

/// One element of a run-time floating type.
__device__ __forceinline__ float load_element(const std::byte* from, DType dtype) {
  switch (dtype) {
    case DType::f16: return widen(*reinterpret_cast<const __half*>(from));
    case DType::bf16: return widen(*reinterpret_cast<const __nv_bfloat16*>(from));
    default: return *reinterpret_cast<const float*>(from);
  }
}

__device__ __forceinline__ void store_element(std::byte* to, DType dtype, float value) {
  switch (dtype) {
    case DType::f16: *reinterpret_cast<__half*>(to) = narrow<__half>(value); break;
    case DType::bf16: *reinterpret_cast<__nv_bfloat16*>(to) = narrow<__nv_bfloat16>(value); break;
    default: *reinterpret_cast<float*>(to) = value; break;
  }
}

/// Four consecutive elements as f32; the address is a multiple of their size.
template <typename T>
__device__ __forceinline__ float4 load_4(const T* from) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float4*>(from);
  } else {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    T lane[4];
    *reinterpret_cast<uint2*>(lane) = raw;
    return {widen(lane[0]), widen(lane[1]), widen(lane[2]), widen(lane[3])};
  }
}

template <typename T>
__device__ __forceinline__ void store_4(T* to, float4 value) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(to) = value;
  } else {
    alignas(8) T lane[4] = {narrow<T>(value.x), narrow<T>(value.y), narrow<T>(value.z), narrow<T>(value.w)};
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(lane);
  }
}

}  // namespace tilewise::cuda
