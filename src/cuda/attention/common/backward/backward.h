#pragma once

#include <string>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma {

struct BackwardSpace;

/// What comes before and after the kernel over tiles.
void prepare_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context);
void finish_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context);

/// Whether gradients have so few elements that a launch more counts, and so does a tile of queries.
constexpr bool few_gradients(const AttentionProblem& problem) {
  constexpr std::int64_t few = std::int64_t{1} << 18;
  return problem.backward.elements < few;
}
/// Whether a call takes the general kernel.
constexpr bool general_backward(const AttentionProblem& problem) {
  return problem.features.needs_more_than_band() || !problem.backward.aligned_rows;
}
constexpr bool general_backward(const AttentionCall& call) { return general_backward(call.problem); }

/// What backward does not take, whatever its kernel over tiles. Score gradients have the rounding of o, and
/// they and weights are rounded to 16 bits, which `strict` does not allow.
std::string unsuited_backward(const AttentionProblem& problem);

}  // namespace tilewise::cuda::mma
