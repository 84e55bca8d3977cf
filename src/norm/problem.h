#pragma once

#include <cstdint>
#include <string>

#include "core/pass.h"
#include "tilewise/norm.h"

namespace tilewise {

/// What a norm computes, apart from how.
struct NormProblem {
  Pass pass = Pass::forward;
  Norm norm = Norm::rms;
  Device device{};
  DType dtype = DType::f32;
  DType weight_dtype = DType::f32;  ///< of weight and bias
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  bool residual = false;
  bool weight = false;
  bool bias = false;
  bool x_gradient = false;
  bool weight_gradient = false;  ///< of weight or bias
  bool aligned = false;          ///< rows of all matrices begin at multiples of 16 bytes
  friend bool operator==(const NormProblem&, const NormProblem&) = default;
};

/// "rms norm forward bf16 M4096 D4096 on cuda:0, residual, weight"
std::string to_string(const NormProblem& problem);

}  // namespace tilewise
