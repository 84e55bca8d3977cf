#pragma once

#include <algorithm>
#include <string>

#include "attention/problem.h"
#include "core/reasons.h"
#include "cuda/attention/common/f32/split_rows.h"

namespace tilewise::cuda::mma_f32 {

/// Why the kernels that split f32 numbers cannot take a problem; empty where they can. The two parts of a
/// number have one bit less than f32. That shows where a result has few terms. It also shows where all rows
/// of V are equal: O is then that row, its error is what the sum of P has lost, and PyTorch's path loses next
/// to nothing there.
inline std::string unsuited(const AttentionProblem& problem) {
  constexpr std::int64_t few_dims = 32;
  constexpr std::int64_t few_queries = 32;
  constexpr std::int64_t few_elements = 4096;
  if (problem.layout == Layout::paged) return "does not support paged keys in f32";
  if (problem.features.needs_more_than_band()) {
    return "supports no features in f32 other than causal, window, lengths and sinks";
  }
  if (problem.repeated_values) return "does not support f32 values that repeat one row";
  if (!problem.usual_scale) return "needs a scale of at least 1e-20 in f32";
  if (problem.dim_qk < few_dims || problem.dim_v < few_dims) {
    return needs("head dims of at least " + std::to_string(few_dims) + " in f32",
                 std::min(problem.dim_qk, problem.dim_v));
  }
  if (problem.length_q < few_queries || problem.most_keys <= few_keys ||
      problem.batch * problem.heads_q * problem.length_q * problem.dim_v < few_elements) {
    return "needs at least " + std::to_string(few_queries) + " queries, " + std::to_string(few_keys + 1) +
           " keys per query and " + std::to_string(few_elements) + " elements of o in f32";
  }
  return {};
}

/// Why these kernels are not batch_invariant: they are exact enough only with enough rows.
inline constexpr const char* depends_on_batch =
    "splits f32 numbers only with enough rows, so its choice would depend on the batch";

/// Splitting f32 costs a pass over Q, K and V, which does not pay off with few pairs of query and key. On an
/// H200 with 32 heads, fused's forward was 1.1 to 1.4 times as fast as mma's with 256 queries and keys, and
/// 0.84 to 1.16 times with 512 of them.
inline std::string too_few_pairs(const AttentionProblem& problem) {
  constexpr std::int64_t few_pairs = std::int64_t{1} << 22;
  return problem.queries * problem.heads_q * problem.most_keys < few_pairs
             ? "fused is faster for f32 with fewer than 2^22 query-key pairs"
             : "";
}

}  // namespace tilewise::cuda::mma_f32
