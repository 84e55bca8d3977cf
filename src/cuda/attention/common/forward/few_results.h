#pragma once

#include "attention/call.h"

namespace tilewise::cuda::mma {

// What `strict` asks of forward. Weights rounded to 16 bits are all that `standard` needs.

/// Whether o has so few elements, or rows of so few, that its largest error is a matter of luck. Weights
/// rounded to 16 bits make about as much error as rounding o does. In many elements that stays well within
/// twice the latter; in few, about one tensor in a thousand has an element that does not, so weights are kept
/// whole there.
constexpr bool few_results(std::int64_t rows, std::int64_t dim_v) {
  constexpr std::int64_t few = 16384;
  constexpr std::int64_t few_dims = 16;
  return dim_v < few_dims || rows * dim_v < few;
}
/// Whether a call keeps its weights whole. Besides the rule above, values of few columns do. Where scores
/// hardly differ, all rows of o are nearly alike, and its largest element is the largest of so few. Worked
/// through on a CPU, 4 of 400 such tensors of 65,536 elements missed the bound with 64 columns, 3 with 128,
/// none with 256; that does not fall with more rows. Past 2^18 elements weights are rounded all the same, and
/// such tensors may miss it: that limit is for speed, and was not measured.
constexpr bool few_results(const AttentionCall& call) {
  constexpr std::int64_t few_columns = 256;
  constexpr std::int64_t few = std::int64_t{1} << 18;
  const AttentionProblem& problem = call.problem;
  if (!problem.strict) return false;
  const std::int64_t rows = call.rows_q() * problem.heads_q;
  return few_results(rows, problem.dim_v) ||
         (problem.batch * problem.heads_kv * problem.dim_v < few_columns && rows * problem.dim_v < few);
}

}  // namespace tilewise::cuda::mma
