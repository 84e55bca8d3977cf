#pragma once

#include "cuda/gemm/common/tuning_problem.h"
#include "cuda/gemm/sm90/tiles/tuning.h"
#include "cuda/tile/tuning_table.h"
#include "gemm/problem.h"

namespace tilewise::cuda::gemm {

// Which row of a tuning table runs a problem: a model of time.

inline int tiles_of(std::int64_t length, int tile) { return static_cast<int>((length + tile - 1) / tile); }

/// The tiles of a result by a row of a table, computed in rounds. A round is one tile on every SM. The two
/// tiles of a cluster count as one.
struct Rounds {
  std::int64_t tiles, tiles_at_once;
  double used;  ///< the fraction of the tiles' elements that are inside the result

  static Rounds of(const GemmProblem& problem, const GemmConfig& c, int multiprocessors) {
    const std::int64_t tiles =
        std::int64_t{tiles_of(problem.m, c.rows_together())} * tiles_of(problem.n, c.columns_together());
    const auto elements = static_cast<double>(tiles * c.rows_together() * c.columns_together());
    return {tiles, multiprocessors / c.blocks(), static_cast<double>(problem.m * problem.n) / elements};
  }
  std::int64_t count() const { return (tiles + tiles_at_once - 1) / tiles_at_once; }
  /// The fraction of what all SMs could compute in these rounds that is part of the result.
  double full() const {
    return used * static_cast<double>(tiles) / static_cast<double>(count() * tiles_at_once);
  }
};

/// About how long a row of a table takes, in arbitrary units. What a tile takes besides its products counts
/// as more of K (GemmConfig::overhead), and so does, once, what a call takes before its first tile and after
/// its last.
inline double time_of(const GemmProblem& problem, const GemmConfig& c, int multiprocessors) {
  constexpr double call_overhead = 1200;
  const std::int64_t rounds = Rounds::of(problem, c, multiprocessors).count();
  const double k = static_cast<double>(rounds * (problem.k + c.overhead)) / static_cast<double>(c.speed);
  return static_cast<double>(c.rows() * c.columns) * (k + call_overhead);
}

template <typename Table>
int choose_row(const GemmProblem& problem, int multiprocessors) {
  return choose_row_of<Table>(
      problem, [](const GemmConfig&) { return true; },
      [&](int row) { return time_of(problem, Table::rows[row], multiprocessors); });
}

}  // namespace tilewise::cuda::gemm
