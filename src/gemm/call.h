#pragma once

#include "core/matrix.h"
#include "gemm/problem.h"

namespace tilewise {

/// A checked call: the problem, and every argument in the form kernels read.
struct GemmCall {
  GemmProblem problem{};
  Matrix a{};         ///< [M, K]
  Matrix b{};         ///< [N, K]
  Matrix gate{};      ///< [N, K], if problem.gated
  Matrix out{};       ///< [M, N]
  Matrix residual{};  ///< [M, N], if problem.residual
  Vector bias{};      ///< [N]; problem.bias says that bias or gate_bias is given
  Vector gate_bias{};
};

/// Computes GemmProblem::as_blas.
inline bool fits_blas(const Matrix& a, const Matrix& b, const Matrix& out, const Matrix& residual,
                      const Vector& bias) {
  return a.apart() && b.apart() && out.apart() && residual.apart() &&
         (bias.data == nullptr || (bias.dtype == a.dtype && bias.stride == 1 &&
                                   reinterpret_cast<std::uintptr_t>(bias.data) % 16 == 0));
}

}  // namespace tilewise
