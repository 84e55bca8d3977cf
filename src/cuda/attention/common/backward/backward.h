#pragma once

#include <string>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma {

struct BackwardSpace;

/// The kernels before and after the one that computes the gradients.
void prepare_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context);
void finish_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context);

/// Whether the gradients have so few elements that one more launch counts, and one more Q tile, too.
constexpr bool few_gradients(const AttentionProblem& problem) {
  constexpr std::int64_t few = std::int64_t{1} << 18;
  return problem.backward.elements < few;
}
/// Whether the general kernel takes a call.
constexpr bool general_backward(const AttentionProblem& problem) {
  return problem.features.needs_more_than_band() || !problem.backward.aligned_rows;
}
constexpr bool general_backward(const AttentionCall& call) { return general_backward(call.problem); }

/// Why backward cannot take a problem, whichever kernel computes the gradients; empty where it can. dS has
/// the rounding error of O, and P and dS are rounded to 16 bits, which `strict` does not allow.
std::string unsuited_backward(const AttentionProblem& problem);

}  // namespace tilewise::cuda::mma
