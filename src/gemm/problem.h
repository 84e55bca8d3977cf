#pragma once

#include <cstdint>
#include <string>

#include "core/pass.h"
#include "tilewise/gemm.h"

namespace tilewise {

/// What a GEMM computes, apart from how: everything that a kernel needs to say whether it supports it.
struct GemmProblem {
  Device device{};
  DType dtype = DType::f32;      ///< of a, b and gate
  DType out_dtype = DType::f32;  ///< of out and residual: dtype or f32
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  bool a_by_rows = true;  ///< a's rows are contiguous, else its columns
  bool b_by_rows = true;  ///< likewise b's and gate's
  Activation activation = Activation::none;
  bool gated = false;
  bool bias = false;  ///< bias or gate_bias
  bool residual = false;
  bool accumulate = false;
  bool allow_tf32 = false;
  bool aligned = false;  ///< rows (or columns) of all matrices begin at multiples of 16 bytes
  /// A BLAS can take the arguments: rows (or columns) of no matrix overlap, and a bias is contiguous, in the
  /// type of a, and begins at a multiple of 16 bytes.
  bool as_blas = false;
  friend bool operator==(const GemmProblem&, const GemmProblem&) = default;
};

/// "gemm bf16 M512 N11008 K4096 on cuda:0, gelu, gated, bias"
std::string to_string(const GemmProblem& problem);

}  // namespace tilewise
