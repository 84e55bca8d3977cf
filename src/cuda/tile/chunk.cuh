#pragma once

#include <type_traits>

#include "core/matrix.h"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda {

// Loads and stores of rows in chunks of 16 bytes, whose elements are f32 in registers.

template <typename T>
inline constexpr int chunk_size = 16 / sizeof(T);

/// A chunk as it is in memory, which is loaded ahead. spread() converts it when it is needed.
template <typename T>
struct RawChunk {
  uint4 bytes;

  __device__ __forceinline__ void load(const T* from) { bytes = *reinterpret_cast<const uint4*>(from); }
  __device__ __forceinline__ void spread(float (&to)[chunk_size<T>]) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      // Converting element by element, the compiler would shift the upper ones down and up again.
      const std::uint32_t twos[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        to[2 * n] = __uint_as_float(twos[n] << 16);
        to[2 * n + 1] = __uint_as_float(twos[n] & 0xFFFF0000u);
      }
    } else {
      const auto* elements = reinterpret_cast<const T*>(&bytes);
#pragma unroll
      for (int n = 0; n < chunk_size<T>; ++n) to[n] = widen(elements[n]);
    }
  }
};

template <typename T>
__device__ __forceinline__ void load_chunk(float (&to)[chunk_size<T>], const T* from) {
  RawChunk<T> raw;
  raw.load(from);
  raw.spread(to);
}

template <typename T>
__device__ __forceinline__ void store_chunk(T* to, const float (&from)[chunk_size<T>]) {
  alignas(16) T elements[chunk_size<T>];
#pragma unroll
  for (int n = 0; n < chunk_size<T>; ++n) elements[n] = narrow<T>(from[n]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(elements);
}

/// Loads as many elements as a chunk has, from element `first` of a contiguous vector of T or f32.
template <typename T>
__device__ __forceinline__ void load_vector_chunk(float (&to)[chunk_size<T>], const Vector& vector,
                                                  std::int64_t first) {
  if (vector.dtype != DType::f32 || sizeof(T) == 4) {
    return load_chunk(to, reinterpret_cast<const T*>(vector.data) + first);
  }
#pragma unroll
  for (int part = 0; part < chunk_size<T> / 4; ++part) {
    *reinterpret_cast<float4*>(to + 4 * part) =
        *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(vector.data) + first + 4 * part);
  }
}

/// Whether load_vector_chunk() can read the vector.
inline bool has_aligned_chunks(const Vector& vector) {
  return reinterpret_cast<std::uintptr_t>(vector.data) % 16 == 0;
}

}  // namespace tilewise::cuda
