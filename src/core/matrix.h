#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tilewise/tensor.h"

namespace tilewise {

// Tensors of rank 2 and 1 in the form that kernels read. CUDA kernels take them by value.

/// Element (r, c) is at r·stride_row + c·stride_column. One of the strides is 1. Strides count elements.
struct Matrix {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride_row = 0;
  std::int64_t stride_column = 1;

  /// Whether the matrix is row-major. A matrix of one row or column, which could be either, is row-major.
  constexpr bool by_rows() const { return stride_column == 1; }
  constexpr std::int64_t offset(std::int64_t r, std::int64_t c) const {
    return r * stride_row + c * stride_column;
  }
  constexpr std::byte* at(std::int64_t r, std::int64_t c) const {
    return data + offset(r, c) * static_cast<std::int64_t>(size_of(dtype));
  }
  /// Whether the rows (of a column-major matrix, the columns) begin at multiples of 16 bytes and their stride
  /// is not negative. A matrix that is not given is aligned.
  bool aligned() const {
    const std::int64_t stride = by_rows() ? stride_row : stride_column;
    const auto bytes = static_cast<std::uintptr_t>(stride) * size_of(dtype);
    return stride >= 0 && (bytes | reinterpret_cast<std::uintptr_t>(data)) % 16 == 0;
  }
  /// Whether the rows (of a column-major matrix, the columns) do not overlap.
  constexpr bool apart() const { return by_rows() ? stride_row >= columns : stride_column >= rows; }
  constexpr Matrix transposed() const { return {data, dtype, columns, rows, stride_column, stride_row}; }
  /// A view of `count` rows from `first` on.
  constexpr Matrix rows_from(std::int64_t first, std::int64_t count) const {
    Matrix view = *this;
    view.rows = count;
    if (data != nullptr) view.data = at(first, 0);
    return view;
  }
};

struct Vector {
  std::byte* data = nullptr;  ///< null if not given
  DType dtype = DType::f32;
  std::int64_t stride = 1;
};

/// The matrix of a tensor of rank 2, one dimension of which is contiguous. A tensor that is not given becomes
/// an empty matrix.
inline Matrix matrix_of(const Tensor& tensor) {
  if (!tensor.given()) return {};
  Matrix matrix{.data = static_cast<std::byte*>(tensor.data),
                .dtype = tensor.dtype,
                .rows = tensor.extent(0),
                .columns = tensor.extent(1),
                .stride_row = tensor.stride(0),
                .stride_column = tensor.stride(1)};
  // A dimension of extent 1 may have any stride. It gets that of a plain matrix.
  if (matrix.columns <= 1 && matrix.stride_row != 1) matrix.stride_column = 1;
  if (matrix.rows <= 1) {
    matrix.stride_row = matrix.stride_column == 1 ? std::max<std::int64_t>(matrix.columns, 1) : 1;
  }
  // An empty matrix may have null data. Adding an offset other than 0 to it would be undefined.
  if (matrix.data == nullptr) (matrix.by_rows() ? matrix.stride_row : matrix.stride_column) = 0;
  return matrix;
}

inline Vector vector_of(const Tensor& tensor) {
  if (!tensor.given()) return {};
  return {.data = static_cast<std::byte*>(tensor.data), .dtype = tensor.dtype, .stride = tensor.stride(0)};
}

}  // namespace tilewise
