#pragma once

#include "core/matrix.h"
#include "tilewise/context.h"

namespace tilewise::cuda {

// Sums over rows in a fixed order: of strips of rows each, then of the strips.

/// How many strips `rows` rows of `columns` are cut into.
int row_strips(std::int64_t rows, std::int64_t columns, int multiprocessors);

/// partials [strips, columns], of x's rows.
void sum_strips(const Matrix& x, float* partials, int strips, const Context& context);

/// sums[n] = Σ partials[strip][n]; nothing where there are no partials.
struct PartialSums {
  const float* partials = nullptr;
  Vector sums{};
};

/// Both in one launch, or one of them.
void sum_partials(const PartialSums& first, const PartialSums& second, std::int64_t strips,
                  std::int64_t columns, const Context& context);

inline void sum_partials(const float* partials, std::int64_t strips, std::int64_t columns, const Vector& sums,
                         const Context& context) {
  sum_partials({partials, sums}, {}, strips, columns, context);
}

}  // namespace tilewise::cuda
