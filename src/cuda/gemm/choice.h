#pragma once

#include <iterator>

#include "cuda/gemm/tuning.h"
#include "gemm/problem.h"

namespace tilewise::cuda::gemm {

// Which row of a tuning table a product runs by.

inline int tiles_of(std::int64_t length, int piece) { return static_cast<int>((length + piece - 1) / piece); }

/// About how long a row of a table takes, in no unit: what a tile takes beside its products counts as more
/// summands, and what a call takes before its first tile and after its last as those of a tile more.
inline double time_of(const GemmProblem& problem, const GemmConfig& c, int multiprocessors) {
  constexpr double once = 1200;
  const std::int64_t tiles =
      std::int64_t{tiles_of(problem.m, c.rows_together())} * tiles_of(problem.n, c.columns_together());
  const std::int64_t at_a_time = multiprocessors / c.blocks();
  const std::int64_t rounds = (tiles + at_a_time - 1) / at_a_time;
  const double summands = static_cast<double>(rounds * (problem.k + c.rest)) / static_cast<double>(c.speed);
  return static_cast<double>(c.rows() * c.columns) * (summands + once);
}

template <typename Table>
int choose_row(const GemmProblem& problem, int multiprocessors) {
  int chosen = 0;
  for (int row = 1; row < static_cast<int>(std::size(Table::rows)); ++row) {
    if (time_of(problem, Table::rows[row], multiprocessors) <
        time_of(problem, Table::rows[chosen], multiprocessors)) {
      chosen = row;
    }
  }
  return chosen;
}

}  // namespace tilewise::cuda::gemm
