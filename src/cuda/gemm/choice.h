#pragma once

#include <iterator>

#include "cuda/gemm/tuning.h"
#include "gemm/problem.h"

namespace tilewise::cuda::gemm {

// Which row of a tuning table a product runs by.

inline int tiles_of(std::int64_t length, int piece) { return static_cast<int>((length + piece - 1) / piece); }

/// The tiles of a result, or those of pairs of blocks.
struct TileCounts {
  int m = 0, n = 0;     ///< wide ones
  bool narrow = false;  ///< and one more column, of narrow ones

  static TileCounts of(const GemmProblem& problem, const GemmConfig& c) {
    const std::int64_t rest = problem.n % c.columns_together();
    const bool narrow = rest > 0 && rest <= c.narrow;
    const int n = tiles_of(problem.n, c.columns_together());
    return {tiles_of(problem.m, c.rows_together()), narrow ? n - 1 : n, narrow};
  }
  /// To share out: two narrow ones are taken for one.
  std::int64_t total() const { return std::int64_t{m} * n + (narrow ? (m + 1) / 2 : 0); }
};

/// About how long a row of a table takes, in no unit: what a tile takes beside its products counts as more
/// summands, and what a call takes before its first tile and after its last as those of a tile more.
inline double time_of(const GemmProblem& problem, const GemmConfig& c, int multiprocessors) {
  constexpr double once = 1200;
  const TileCounts tiles = TileCounts::of(problem, c);
  const std::int64_t at_a_time = multiprocessors / c.blocks();
  const std::int64_t rounds = (tiles.total() + at_a_time - 1) / at_a_time;
  // Columns that a block multiplies at most, and what it does not hide of as many tiles' ends.
  std::int64_t columns = rounds * c.columns, ends = rounds * c.columns;
  if (tiles.narrow) columns += 2 * c.narrow - c.columns, ends += 2 * c.narrow;
  const auto time = static_cast<double>(columns * problem.k + ends * c.rest) / static_cast<double>(c.speed);
  return static_cast<double>(c.rows()) * (time + once * static_cast<double>(c.columns));
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
