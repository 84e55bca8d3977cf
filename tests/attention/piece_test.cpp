#include "support/pieces.h"

#include <gtest/gtest.h>

#include <string>

#include "property/check.h"

namespace tilewise::test {
namespace {

// Cut at random, every random problem gives what the whole gives, under the same bound on errors.
void check_kernel(const std::string& kernel, std::uint64_t base, int wanted) {
  Random rng(base);
  for (int taken = 0; taken < wanted;) {
    const std::uint64_t seed = rng.bits();
    const RandomProblem problem = random_problem(seed);
    if (!suits_pieces(problem)) continue;
    ++taken;
    const Checker checker(problem, 1);
    PieceRunner runner;
    const Subject subject{.kernel = kernel,
                          .repetition = 0,
                          .forward =
                              [&](const AttentionInputs& inputs, const AttentionOptions& options,
                                  const AttentionOutputs& outputs, const Context& context) {
                                forward_in_pieces(seed, inputs, options, outputs, context, runner);
                              },
                          .backward =
                              [&](const AttentionInputs& inputs, const AttentionOptions& options,
                                  const AttentionGradients& gradients, const Context& context) {
                                backward_in_pieces(seed, inputs, options, gradients, context, runner);
                              }};
    for (const std::string& failure : checker.check(subject)) {
      ADD_FAILURE() << "seed " << seed << ", " << to_string(problem) << ": " << failure;
    }
  }
}

TEST(Piece, ReferenceJoinsToTheWhole) { check_kernel("reference", 1, 30); }
TEST(Piece, SimdJoinsToTheWhole) { check_kernel("simd", 2, 60); }

}  // namespace
}  // namespace tilewise::test
