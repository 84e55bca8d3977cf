#pragma once

#include "operands.h"
#include "problem.h"

namespace tilewise::bench {

/// The largest absolute difference between the results of a kernel (O, or dQ, dK and dV) and the formula in
/// f64, over a few rows that are spread over the problem. NaN if a sampled result is NaN.
double sampled_error(const Problem& problem, const Operands& operands);

}  // namespace tilewise::bench
