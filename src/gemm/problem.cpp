#include "gemm/problem.h"

#include <sstream>

namespace tilewise {

std::string to_string(const GemmProblem& problem) {
  std::ostringstream text;
  text << "gemm " << to_string(problem.dtype) << " M" << problem.m << " N" << problem.n << " K" << problem.k
       << " on " << to_string(problem.device);
  if (problem.out_dtype != problem.dtype) text << ", " << to_string(problem.out_dtype) << " out";
  if (!problem.a_by_rows) text << ", a by columns";
  if (!problem.b_by_rows) text << ", b by columns";
  if (problem.activation != Activation::none) text << ", " << to_string(problem.activation);
  if (problem.gated) text << ", gated";
  if (problem.bias) text << ", bias";
  if (problem.residual) text << ", residual";
  if (problem.accumulate) text << ", accumulate";
  return text.str();
}

}  // namespace tilewise
