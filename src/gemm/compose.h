#pragma once

#include "gemm/kernel.h"

namespace tilewise {

// GEMM calls that are parts of other operations. Their arguments were checked by those operations.

/// The optional parts of a GEMM.
struct GemmParts {
  Matrix gate{};
  Matrix residual{};
  Vector bias{};
  Vector gate_bias{};
  Activation activation = Activation::none;
  bool accumulate = false;
  bool allow_tf32 = false;
};

/// The call for out (+)= f(A·Bᵀ + bias) + residual, gated or not, as tilewise/gemm.h has it.
inline GemmCall gemm_call(Device device, const Matrix& a, const Matrix& b, const Matrix& out,
                          const GemmParts& parts = {}) {
  const bool gated = parts.gate.rows != 0 || parts.gate.data != nullptr;
  const bool residual = parts.residual.data != nullptr;
  return {.problem = {.device = device,
                      .dtype = a.dtype,
                      .out_dtype = out.dtype,
                      .m = a.rows,
                      .n = b.rows,
                      .k = a.columns,
                      .a_by_rows = a.by_rows(),
                      .b_by_rows = b.by_rows(),
                      .activation = parts.activation,
                      .gated = gated,
                      .bias = parts.bias.data != nullptr || parts.gate_bias.data != nullptr,
                      .residual = residual,
                      .accumulate = parts.accumulate,
                      .allow_tf32 = parts.allow_tf32,
                      .aligned = a.aligned() && b.aligned() && parts.gate.aligned() && out.aligned() &&
                                 parts.residual.aligned(),
                      .as_blas = fits_blas(a, b, out, parts.residual, parts.bias)},
          .a = a,
          .b = b,
          .gate = parts.gate,
          .out = out,
          .residual = parts.residual,
          .bias = parts.bias,
          .gate_bias = parts.gate_bias};
}

}  // namespace tilewise
