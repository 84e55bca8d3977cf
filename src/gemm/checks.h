#pragma once

#include "core/checks.h"
#include "core/matrix.h"

namespace tilewise {

// Checks that gemm and ffn share.

/// Checks a tensor of rank 2 of this type, one of whose dimensions must be contiguous.
inline void check_matrix(const Tensor& tensor, std::string_view name, DType dtype, const Context& context) {
  check_dtype(tensor, name, dtype);
  check_memory(tensor, name, context);
  const bool contiguous =
      tensor.stride(0) == 1 || tensor.stride(1) == 1 || tensor.extent(0) <= 1 || tensor.extent(1) <= 1;
  check(contiguous, name, "a matrix with a contiguous dimension", [&] {
    return "strides " + std::to_string(tensor.stride(0)) + " and " + std::to_string(tensor.stride(1));
  });
}

inline void check_bias(const Tensor& bias, std::string_view name, std::int64_t count, DType dtype,
                       const Context& context) {
  if (!bias.given()) return;
  check_shape(bias, name, {count}, "a value for each output", context);
  check(
      bias.dtype == dtype || bias.dtype == DType::f32, name,
      [&] { return "f32 or the type of the product, " + std::string(to_string(dtype)); },
      to_string(bias.dtype));
}

inline void check_same_layout(const Matrix& matrix, std::string_view name, const Matrix& other,
                              std::string_view other_name) {
  check(
      matrix.by_rows() == other.by_rows(), name,
      [&] { return "the same contiguous dimension as " + std::string(other_name); }, "the other");
}

}  // namespace tilewise
