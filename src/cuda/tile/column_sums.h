#pragma once

#include "core/matrix.h"
#include "tilewise/context.h"

namespace tilewise::cuda {

// Sums over the rows of a matrix, in a fixed order: first over strips of rows, then over the strips.

/// The number of strips for a matrix [rows, columns].
int row_strips(std::int64_t rows, std::int64_t columns, int multiprocessors);

/// Writes the sum of each strip of x's rows to `partials` [strips, columns].
void sum_strips(const Matrix& x, float* partials, int strips, const Context& context);

/// sums[n] = Σ partials[strip][n]. Without partials, nothing is computed.
struct PartialSums {
  const float* partials = nullptr;
  Vector sums{};
};

/// Computes both sums, or the one that has partials, in one launch.
void sum_partials(const PartialSums& first, const PartialSums& second, std::int64_t strips,
                  std::int64_t columns, const Context& context);

inline void sum_partials(const float* partials, std::int64_t strips, std::int64_t columns, const Vector& sums,
                         const Context& context) {
  sum_partials({partials, sums}, {}, strips, columns, context);
}

}  // namespace tilewise::cuda
