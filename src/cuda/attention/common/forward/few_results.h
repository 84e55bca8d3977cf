#pragma once

#include "attention/call.h"

namespace tilewise::cuda::mma {

// When `strict` forward needs P to be exact. For `standard`, P rounded to 16 bits is enough.

/// Whether O has so few elements, or so few per row, that its largest error depends on chance. Rounding P to
/// 16 bits makes about as large an error as rounding O. With many elements the total stays well below
/// twice the latter. With few, about one tensor in a thousand has an element that does not, so there P is
/// kept exact.
constexpr bool few_results(std::int64_t rows, std::int64_t dim_v) {
  constexpr std::int64_t few = 16384;
  constexpr std::int64_t few_dims = 16;
  return dim_v < few_dims || rows * dim_v < few;
}
/// Whether a call keeps P exact. Besides the rule above, this depends on the columns of V. Where scores
/// hardly differ, all rows of O are nearly equal, and its largest element is the largest of that few.
/// Simulated on a CPU, 4 of 400 such tensors of 65,536 elements missed the bound with 64 columns, 3 with 128,
/// and none with 256; more rows do not help. Past 2^18 elements P is rounded anyway, and such tensors may
/// miss the bound: this limit is for speed and was not measured.
constexpr bool keeps_p_exact(const AttentionCall& call) {
  constexpr std::int64_t few_columns = 256;
  constexpr std::int64_t few = std::int64_t{1} << 18;
  const AttentionProblem& problem = call.problem;
  if (!problem.strict) return false;
  if (problem.batch_invariant) return true;  // the number of rows does not count
  const std::int64_t rows = call.rows_q() * problem.heads_q;
  return few_results(rows, problem.dim_v) ||
         (problem.batch * problem.heads_kv * problem.dim_v < few_columns && rows * problem.dim_v < few);
}

}  // namespace tilewise::cuda::mma
