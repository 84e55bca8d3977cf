#pragma once

#include <cmath>
#include <limits>

#include "cpu/reference/score.h"

namespace tilewise::cpu::reference {

inline constexpr double nothing = -std::numeric_limits<double>::infinity();

/// The softmax of a row, its sink included. Weights come from maximum and sum, not from lse: beside a maximum
/// of 1e38, which a mask may make, the logarithm of the sum would vanish.
struct Softmax {
  double maximum = nothing;
  double sum = 0;  ///< 0: there was nothing to attend to

  double lse() const { return sum == 0 ? nothing : maximum + std::log(sum); }

  /// The weight of a key before dropout. A hidden key weighs nothing, in an empty row too.
  double weight(double score) const { return score == nothing ? 0.0 : std::exp(score - maximum) / sum; }
};

/// Fills scores [Sk] of a query.
inline Softmax softmax_row(const Query& query, double* scores) {
  const AttentionCall& call = query.call;
  const double sink = call.problem.features.sinks ? call.sinks.at(query.b, query.h) : nothing;
  Softmax row{.maximum = sink, .sum = 0};
  bool empty = sink == nothing;
  for (std::int64_t j = 0; j < query.sequence.length_k; ++j) {
    scores[j] = query.score(j);
    row.maximum = std::fmax(row.maximum, scores[j]);
    empty = empty && scores[j] == nothing;  // a NaN is not nothing
  }
  if (empty) return row;
  row.sum = std::exp(sink - row.maximum);
  for (std::int64_t j = 0; j < query.sequence.length_k; ++j) row.sum += std::exp(scores[j] - row.maximum);
  return row;
}

}  // namespace tilewise::cpu::reference
