#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "property/check.h"
#include "support/pieces.h"

namespace tilewise::test {
namespace {

// Pieces take dense tensors.
bool takes_pieces(const RandomProblem& problem) {
  return problem.layout == Layout::dense && !problem.key_lengths.given() && !problem.blocks.counts.given();
}

// A piece's gradients are made from lse and delta, and are as precise as these tell of the weights: where
// scores are small and rows see several keys. Where one key has all the weight a whole problem's gradients
// are differences of equal numbers, exactly 0, which those of a piece are to a rounding.
bool ordinary(const RandomProblem& problem) {
  const bool repeated = problem.k.strides()[2] == 0 || problem.v.strides()[2] == 0;
  if (problem.length_q < 8 || problem.length_k < 8 || repeated) return false;
  const RandomProblem wide = widened(problem);
  const OutputBuffers outputs = make_outputs(wide);
  AttentionOptions options = problem.options;
  options.kernel = "reference";
  run_forward(wide.inputs(), options, outputs.view(), {.parallel_for = openmp_parallel_for(2)});
  for (const double lse : outputs.lse.values()) {
    if (std::isfinite(lse) && std::abs(lse) > 16) return false;
  }
  return true;
}

// Cut at random, every random problem gives what the whole gives, under the same bound on errors.
void check_kernel(const std::string& kernel, std::uint64_t base, int wanted) {
  Random rng(base);
  for (int taken = 0; taken < wanted;) {
    const std::uint64_t seed = rng.bits();
    const RandomProblem problem = random_problem(seed);
    if (!takes_pieces(problem) || !ordinary(problem)) continue;
    ++taken;
    const Checker checker(problem, 1);
    const Subject subject{
        .kernel = kernel,
        .repetition = 0,
        .forward = [seed](const AttentionInputs& inputs, const AttentionOptions& options,
                          const AttentionOutputs& outputs,
                          Context context) { forward_in_pieces(seed, inputs, options, outputs, context); },
        .backward = [seed](
                        const AttentionInputs& inputs, const AttentionOptions& options,
                        const AttentionGradients& gradients,
                        Context context) { backward_in_pieces(seed, inputs, options, gradients, context); }};
    for (const std::string& failure : checker.check(subject)) {
      ADD_FAILURE() << "seed " << seed << ", " << to_string(problem) << ": " << failure;
    }
  }
}

TEST(Piece, ReferenceJoinsToTheWhole) { check_kernel("reference", 1, 30); }
TEST(Piece, SimdJoinsToTheWhole) { check_kernel("simd", 2, 60); }

}  // namespace
}  // namespace tilewise::test
