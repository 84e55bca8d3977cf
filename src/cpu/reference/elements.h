#pragma once

#include "core/load.h"
#include "core/matrix.h"

namespace tilewise::cpu {

// Reads and writes elements of matrices and vectors of any type as f64.

inline double element(const Matrix& matrix, std::int64_t r, std::int64_t c) {
  return load_element(matrix.data, matrix.dtype, matrix.offset(r, c));
}

inline double element(const Vector& vector, std::int64_t n, double otherwise = 0) {
  return vector.data == nullptr ? otherwise : load_element(vector.data, vector.dtype, n * vector.stride);
}

inline void store(const Matrix& matrix, std::int64_t r, std::int64_t c, double value) {
  store_element(matrix.data, matrix.dtype, matrix.offset(r, c), value);
}

inline void store(const Vector& vector, std::int64_t n, double value) {
  if (vector.data != nullptr) store_element(vector.data, vector.dtype, n * vector.stride, value);
}

/// Element (m, n) of a·bᵀ + bias.
inline double product(const Matrix& a, const Matrix& b, const Vector& bias, std::int64_t m, std::int64_t n) {
  double sum = element(bias, n);
  for (std::int64_t k = 0; k < a.columns; ++k) sum += element(a, m, k) * element(b, n, k);
  return sum;
}

}  // namespace tilewise::cpu
