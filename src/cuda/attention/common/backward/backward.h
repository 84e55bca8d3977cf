#pragma once

#include <string>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma {

struct BackwardSpace;

/// What comes before and after the kernel over tiles.
void prepare_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context);
void finish_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context);

/// Whether gradients have so few elements that the largest error in one is a matter of luck.
constexpr bool few_gradients(const AttentionProblem& problem) {
  constexpr std::int64_t few = std::int64_t{1} << 18;
  return problem.backward.elements < few;
}
/// Whether few queries may add to a key's gradients, in which a single rounded one then shows however many
/// keys there are. Worked through on a CPU with 300,000 elements of dk and scores of deviation 1, 8 of 150
/// tensors missed the bound with 6 queries a key, 1 of 190 with 16, 1 of 190 with 32 or 35, none of 340 with
/// 64 to 128. A window leaves as many queries to a key as keys to a query, and a mask may leave a few of
/// many: random ones leave a tenth. That costs such calls eight products a pair of tiles instead of five;
/// masks that are the same for all queries, as padding is, do not.
constexpr bool few_queries(const AttentionProblem& problem) {
  constexpr std::int64_t few = 32;
  constexpr std::int64_t few_of_thinned = 128;
  const bool window = problem.most_keys < problem.length_k;
  const std::int64_t seen =
      window && problem.most_keys < problem.length_q ? problem.most_keys : problem.length_q;
  const std::int64_t least = (problem.backward.thinned_queries ? few_of_thinned : few) * problem.heads_kv;
  return seen * problem.heads_q < few * problem.heads_kv || problem.length_q * problem.heads_q < least;
}
/// Whether weights and score gradients are kept whole on their way into dv, dk and dq: where gradients or
/// their terms are few, and where all queries have the same products. There a key has the same weight for all
/// of them, which would be rounded the same way each time: in dv that adds up where else it averages out.
constexpr bool whole_pairs(const AttentionProblem& problem) {
  return few_gradients(problem) || few_queries(problem) || problem.backward.alike_queries;
}
/// Whether a call takes the general kernel.
constexpr bool general_backward(const AttentionProblem& problem) {
  return problem.features.needs_more_than_band() || !problem.backward.aligned_rows || whole_pairs(problem);
}
constexpr bool general_backward(const AttentionCall& call) { return general_backward(call.problem); }

/// What backward does not take, whatever its kernel over tiles. Score gradients have the rounding of o. Of
/// few keys it does not average out; beside those of keys or values that are all the same, which are 0, it
/// shows.
std::string unsuited_backward(const AttentionProblem& problem);

}  // namespace tilewise::cuda::mma
