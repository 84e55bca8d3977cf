#pragma once

#include <cmath>
#include <limits>

#include "cpu/reference/score.h"

namespace tilewise::cpu::reference {

/// Fills scores [Sk] of a query and gives its lse, the sink included. −inf when there is nothing to attend
/// to.
inline double softmax_row(const Query& query, double* scores) {
  constexpr double none = -std::numeric_limits<double>::infinity();
  const AttentionCall& call = query.call;
  const double sink = call.problem.features.sinks ? call.sinks.at(query.b, query.h) : none;
  double maximum = sink;
  bool empty = sink == none;
  for (std::int64_t j = 0; j < query.sequence.length_k; ++j) {
    scores[j] = query.score(j);
    maximum = std::fmax(maximum, scores[j]);
    empty = empty && scores[j] == none;  // a NaN is not nothing
  }
  if (empty) return none;
  double sum = std::exp(sink - maximum);
  for (std::int64_t j = 0; j < query.sequence.length_k; ++j) sum += std::exp(scores[j] - maximum);
  return maximum + std::log(sum);
}

/// exp(score − lse): the weight of a key before dropout. A hidden key weighs nothing, in an empty row too.
inline double weight_of(double score, double lse) {
  return score == -std::numeric_limits<double>::infinity() ? 0.0 : std::exp(score - lse);
}

}  // namespace tilewise::cpu::reference
