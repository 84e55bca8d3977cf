#pragma once

#include "cuda/gemm/common/tuning_problem.h"
#include "cuda/gemm/sm90/tiles/tuning.h"
#include "cuda/tile/tuning_table.h"
#include "gemm/problem.h"

namespace tilewise::cuda::gemm {

// Which row of a tuning table a product runs by.

inline int tiles_of(std::int64_t length, int piece) { return static_cast<int>((length + piece - 1) / piece); }

/// The tiles of a result by a row of a table, in rounds of as many as all multiprocessors have at a time.
struct Rounds {
  std::int64_t tiles, at_a_time;
  double used;  ///< of the tiles' elements, those of the result

  static Rounds of(const GemmProblem& problem, const GemmConfig& c, int multiprocessors) {
    const std::int64_t tiles =
        std::int64_t{tiles_of(problem.m, c.rows_together())} * tiles_of(problem.n, c.columns_together());
    const auto elements = static_cast<double>(tiles * c.rows_together() * c.columns_together());
    return {tiles, multiprocessors / c.blocks(), static_cast<double>(problem.m * problem.n) / elements};
  }
  std::int64_t count() const { return (tiles + at_a_time - 1) / at_a_time; }
  /// Of what all multiprocessors could have in so many rounds.
  double full() const { return used * static_cast<double>(tiles) / static_cast<double>(count() * at_a_time); }
};

/// About how long a row of a table takes, in no unit: what a tile takes beside its products counts as more
/// summands, and what a call takes before its first tile and after its last as those of a tile more.
inline double time_of(const GemmProblem& problem, const GemmConfig& c, int multiprocessors) {
  constexpr double once = 1200;
  const std::int64_t rounds = Rounds::of(problem, c, multiprocessors).count();
  const double summands = static_cast<double>(rounds * (problem.k + c.rest)) / static_cast<double>(c.speed);
  return static_cast<double>(c.rows() * c.columns) * (summands + once);
}

template <typename Table>
int choose_row(const GemmProblem& problem, int multiprocessors) {
  return choose_row_of<Table>(
      problem, [](const GemmConfig&) { return true; },
      [&](int row) { return time_of(problem, Table::rows[row], multiprocessors); });
}

}  // namespace tilewise::cuda::gemm
