#pragma once

#include "core/matrix.h"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda {

/// Element n of a vector of T or f32.
template <typename T>
__device__ __forceinline__ float bias_at(const Vector& bias, std::int64_t n) {
  return bias.dtype == DType::f32 ? reinterpret_cast<const float*>(bias.data)[n * bias.stride]
                                  : widen(reinterpret_cast<const T*>(bias.data)[n * bias.stride]);
}

}  // namespace tilewise::cuda
