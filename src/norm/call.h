#pragma once

#include "core/matrix.h"
#include "norm/problem.h"

namespace tilewise {

/// A checked call: the problem, and every argument in the form kernels read. The data of an argument that is
/// not given is null. All matrices are [M, D] with contiguous rows; vectors of D elements are contiguous.
struct NormCall {
  NormProblem problem{};
  double epsilon = 0;
  Matrix x{};
  Vector weight{}, bias{};
  Matrix residual{}, y{}, sum{};  ///< forward; sum may be x or residual, y may be x
  Vector rstd{}, mean{};          ///< [M], written by forward and read by backward
  Matrix dy{}, d_sum{}, dx{};     ///< backward; dx may be dy or d_sum
  Vector d_weight{}, d_bias{};
};

}  // namespace tilewise
