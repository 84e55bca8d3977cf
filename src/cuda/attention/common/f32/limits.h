#pragma once

#include <string>

#include "attention/problem.h"
#include "cuda/attention/common/f32/split_rows.h"

namespace tilewise::cuda::mma_f32 {

/// What f32, whose numbers are split, does not take. The two parts of a number have a bit less than it, which
/// shows where a result has few terms; and where all values are one row, which is the result: what the sum of
/// weights has lost is all that it is off, and the path's weights lose next to nothing.
inline std::string unsuited(const AttentionProblem& problem) {
  constexpr std::int64_t few_dims = 32;
  constexpr std::int64_t few_queries = 32;
  constexpr std::int64_t few_elements = 4096;
  if (problem.layout == Layout::paged) return "takes no paged f32";
  if (problem.features.needs_more_than_band()) {
    return "takes f32 with causal, window, lengths and sinks alone, no other feature";
  }
  if (problem.repeated_values) return "takes no f32 values that are one row repeated";
  if (!problem.usual_scale) return "takes f32 with scales above 1e-20 alone";
  if (problem.dim_qk < few_dims || problem.dim_v < few_dims) {
    return "takes f32 with head dims from " + std::to_string(few_dims) + " on";
  }
  if (problem.length_q < few_queries || problem.most_keys <= few_keys ||
      problem.batch * problem.heads_q * problem.length_q * problem.dim_v < few_elements) {
    return "takes f32 with " + std::to_string(few_queries) + " queries or more, more than " +
           std::to_string(few_keys) + " keys that a query may see, and results of at least " +
           std::to_string(few_elements) + " elements";
  }
  return {};
}

/// Splitting f32 costs a pass over all numbers, which few pairs of query and key do not pay back: on an H200,
/// with 32 heads of 256 queries and keys fused's forward was 1.1 to 1.4 times as fast as mma's, with 512 of
/// them 0.84 to 1.16 times.
inline std::string too_few_pairs(const AttentionProblem& problem) {
  constexpr std::int64_t few_pairs = std::int64_t{1} << 22;
  return problem.queries * problem.heads_q * problem.most_keys < few_pairs
             ? "leaves fewer than 2^22 pairs of f32 to fused, which is faster there"
             : "";
}

}  // namespace tilewise::cuda::mma_f32
