#pragma once

#include "attention/call.h"

namespace tilewise {

// Conversion of tensors to the forms that a call holds.

// Dense and paged tensors are [b, h, s, d], packed ones [s, h, d].
inline Rows rows_of(const Tensor& tensor, Layout layout) {
  if (!tensor.given()) return {};
  const bool packed = layout == Layout::packed;
  return {.data = static_cast<std::byte*>(tensor.data),
          .dtype = tensor.dtype,
          .stride_b = packed ? 0 : tensor.stride(0),
          .stride_h = tensor.stride(1),
          .stride_s = packed ? tensor.stride(0) : tensor.stride(2),
          .wanted = true};
}

// LSE, dLSE and delta: [B, Hq, Sq], packed [Hq, total].
inline Rows statistics_of(const Tensor& tensor, Layout layout) {
  if (!tensor.given()) return {};
  const bool packed = layout == Layout::packed;
  return {.data = static_cast<std::byte*>(tensor.data),
          .dtype = tensor.dtype,
          .stride_b = packed ? 0 : tensor.stride(0),
          .stride_h = tensor.stride(packed ? 0 : 1),
          .stride_s = tensor.stride(packed ? 1 : 2),
          .wanted = true};
}

inline MaskView mask_view(const Tensor& tensor) {
  MaskView view{.data = static_cast<std::byte*>(tensor.data), .dtype = tensor.dtype};
  const int missing = 4 - tensor.rank;
  for (int dim = 0; dim < 4; ++dim) {
    view.extent[dim] = dim < missing ? 1 : tensor.extent(dim - missing);
    view.stride[dim] = view.extent[dim] == 1 ? 0 : tensor.stride(dim - missing);
  }
  return view;
}

inline HeadValues head_values(const Tensor& tensor) {
  return {.data = tensor.data,
          .dtype = tensor.dtype,
          .stride_b = tensor.rank == 2 ? tensor.stride(0) : 0,
          .stride_h = tensor.rank == 2 ? tensor.stride(1) : tensor.stride(0)};
}

}  // namespace tilewise
