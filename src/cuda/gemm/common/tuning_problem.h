#pragma once

#include "core/tuning.h"
#include "gemm/problem.h"

namespace tilewise {

/// The parts of a problem on which the speed of a configuration depends, as tuning files name them.
template <typename Text>
void describe_problem(const GemmProblem& problem, Description<Text>& to) {
  to.word(to_string(problem.dtype));
  to.size("m", problem.m);
  to.size("n", problem.n);
  to.size("k", problem.k);
  to.word(problem.activation == Activation::none ? "" : "activation");
}
inline Device tuning_device(const GemmProblem& problem) { return problem.device; }

}  // namespace tilewise
