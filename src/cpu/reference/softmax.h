#pragma once

#include <cmath>
#include <limits>

#include "cpu/reference/score.h"

namespace tilewise::cpu::reference {

inline constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

/// The softmax of a row, its sink included. P is computed from maximum and sum, not from LSE: a mask can
/// raise the maximum to 1e38, and rounding would then lose the logarithm of the sum.
struct Softmax {
  double maximum = minus_infinity;
  double sum = 0;  ///< 0: the row is empty

  double lse() const { return sum == 0 ? minus_infinity : maximum + std::log(sum); }

  /// P of a key before dropout. It is 0 for a hidden key, also in an empty row.
  double p(double score) const { return score == minus_infinity ? 0.0 : std::exp(score - maximum) / sum; }
};

/// Fills `scores` [Sk] with S of a query and returns the softmax over them.
inline Softmax softmax_row(const Query& query, double* scores) {
  const AttentionCall& call = query.call;
  const double sink = call.problem.features.sinks ? call.sinks.at(query.b, query.h) : minus_infinity;
  Softmax row{.maximum = sink, .sum = 0};
  bool empty = sink == minus_infinity;
  for (std::int64_t j = 0; j < query.sequence.length_k; ++j) {
    scores[j] = query.score(j);
    row.maximum = std::fmax(row.maximum, scores[j]);
    empty = empty && scores[j] == minus_infinity;  // a row with a NaN is not empty
  }
  if (empty) return row;
  row.sum = std::exp(sink - row.maximum);
  for (std::int64_t j = 0; j < query.sequence.length_k; ++j) row.sum += std::exp(scores[j] - row.maximum);
  return row;
}

}  // namespace tilewise::cpu::reference
