#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tilewise/tensor.h"

namespace tilewise {

// Tensors of rows per head, and of indices, in the form that kernels read. CUDA kernels take them by value,
// and their functions are constexpr so that they can be called there.

/// A tensor as contiguous rows at (b, h, s). Strides count elements. In packed tensors stride_b is 0, in
/// paged ones it is the stride of a page.
struct Rows {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride_b = 0;
  std::int64_t stride_h = 0;
  std::int64_t stride_s = 0;
  bool wanted = false;  ///< whether the caller gave the tensor

  constexpr std::byte* at(std::int64_t b, std::int64_t h, std::int64_t s) const {
    const std::int64_t offset = b * stride_b + h * stride_h + s * stride_s;
    return data + offset * static_cast<std::int64_t>(size_of(dtype));
  }
};

/// The number clamped to [low, high]; `low` if that range is empty. Kernels apply it to every number that
/// they read from an index tensor on a device, since nobody may have checked it: see docs/debugging.md.
constexpr std::int64_t within(std::int64_t number, std::int64_t low, std::int64_t high) {
  return std::max(low, std::min(number, high));
}

/// An i32 tensor of up to four dimensions, broadcast through zero strides.
struct Indices {
  const std::int32_t* data = nullptr;
  std::int64_t stride[4] = {};

  constexpr std::int32_t at(std::int64_t a, std::int64_t b = 0, std::int64_t c = 0,
                            std::int64_t d = 0) const {
    return data[a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]];
  }
};

inline Indices indices_of(const Tensor& tensor) {
  Indices view{.data = static_cast<const std::int32_t*>(tensor.data)};
  for (int dim = 0; dim < std::min(tensor.rank, 4); ++dim) {
    view.stride[dim] = tensor.extent(dim) == 1 ? 0 : tensor.stride(dim);
  }
  return view;
}

}  // namespace tilewise
