#pragma once

#include "core/matrix.h"
#include "gemm/problem.h"

namespace tilewise {

/// A checked call: the problem, and every argument in the form kernels read.
struct GemmCall {
  GemmProblem problem{};
  Matrix a{};         ///< [M, K]
  Matrix b{};         ///< [N, K]
  Matrix gate{};      ///< [N, K], where problem.gated
  Matrix out{};       ///< [M, N]
  Matrix residual{};  ///< [M, N], where problem.residual
  Vector bias{};      ///< [N]; either may be absent where problem.bias
  Vector gate_bias{};
};

}  // namespace tilewise
