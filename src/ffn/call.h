#pragma once

#include <cstddef>

#include "core/matrix.h"
#include "ffn/problem.h"

namespace tilewise {

/// A checked call: the problem, and every argument in the form kernels read.
struct FfnCall {
  FfnProblem problem{};
  std::size_t max_intermediate_bytes = 0;
  Matrix x{};                           ///< [M, E]
  Matrix up{};                          ///< [F, E]
  Matrix gate{};                        ///< [F, E], if problem.gated
  Matrix down{};                        ///< [O, F]
  Vector up_bias{};                     ///< [F]
  Vector gate_bias{};                   ///< [F]
  Vector down_bias{};                   ///< [O]
  Matrix residual{};                    ///< [M, O]; forward, if problem.residual
  Matrix out{};                         ///< [M, O]; forward
  Matrix up_product{}, gate_product{};  ///< [M, F]; if problem.kept
  Matrix d_out{};  ///< [M, O]; this and the rest: backward. Data is null if a gradient is not asked for.
  Matrix dx{}, d_up{}, d_gate{}, d_down{};
  Vector d_up_bias{}, d_gate_bias{}, d_down_bias{};
};

}  // namespace tilewise
