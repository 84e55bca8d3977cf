#pragma once

#include "operands.h"
#include "problem.h"

namespace tilewise::bench {

/// The largest difference between what a kernel wrote and the formula in float64, over a handful of rows
/// spread over the problem: of o, or of dq, dk and dv. NaN where a sampled result is NaN.
double sampled_error(const Problem& problem, const Operands& operands);

}  // namespace tilewise::bench
