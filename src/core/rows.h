#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tilewise/tensor.h"

namespace tilewise {

// Tensors of heads and of indices in the form kernels read. They are passed to CUDA kernels by value, and
// their functions are constexpr so that they may be called there.

/// A tensor seen as rows: that of (b, h, s) is contiguous. Strides count elements; packed tensors have
/// stride_b 0 and paged ones the stride of a page there.
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

/// A number brought into [low, high], and to `low` where that is empty. Kernels pass what they read from
/// index tensors on a device through it, where nobody has looked at the numbers: see docs/debugging.md.
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
