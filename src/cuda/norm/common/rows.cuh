#pragma once

#include "core/matrix.h"

namespace tilewise::cuda::norm {

template <typename T>
__device__ __forceinline__ T* row_of(const Matrix& matrix, std::int64_t m) {
  return reinterpret_cast<T*>(matrix.data) + m * matrix.stride_row;
}

/// Mean or rstd of row m: 0 if there is none, and stored only if it is asked for.
__device__ __forceinline__ float statistic(const Vector& from, std::int64_t m) {
  return from.data == nullptr ? 0.0f : reinterpret_cast<const float*>(from.data)[m * from.stride];
}
__device__ __forceinline__ void store_statistic(const Vector& to, std::int64_t m, float value) {
  if (to.data != nullptr) reinterpret_cast<float*>(to.data)[m * to.stride] = value;
}

}  // namespace tilewise::cuda::norm
