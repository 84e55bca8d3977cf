#include <gtest/gtest.h>

#include <cstdint>

#include "attention/validate.h"
#include "cuda/attention/sm80/backward/backward.h"
#include "support/random_problem.h"

// Whether the problems drawn for the backward of mma are the ones that it is to be tested on.
namespace tilewise::test::random_mma_problem_test {
namespace {

constexpr int problems = 150;

AttentionProblem backward_of(const RandomProblem& p) {
  const OutputBuffers outputs = make_outputs(p);
  const GradientBuffers gradients = make_gradients(p);
  return checked_backward(p.inputs(), p.options,
                          {.o = outputs.o.view(),
                           .lse = outputs.lse.view(),
                           .d_o = p.d_o.view(),
                           .d_lse = p.d_lse.view(),
                           .dq = gradients.dq.view(),
                           .dk = gradients.dk.view(),
                           .dv = gradients.dv.view(),
                           .dmask = gradients.dmask.view(),
                           .dsinks = gradients.dsinks.view(),
                           .dlogit_scale = gradients.dlogit_scale.view()},
                          Context{})
      .problem;
}

TEST(RandomMmaProblem, ManyHaveManyResultsAndManyOfTheseArePlain) {
  int many = 0;
  int plain = 0;
  int ordered = 0;
  int packed = 0;
  for (std::uint64_t seed = 1; seed <= problems; ++seed) {
    const AttentionProblem problem = backward_of(random_mma_problem(seed));
    if (cuda::mma::few_gradients(problem)) continue;
    ++many;
    if (cuda::mma::general_backward(problem) || problem.backward.repeated_keys) continue;
    EXPECT_GT(problem.length_k, 64);
    ++plain;
    if (problem.backward.deterministic) ++ordered;
    if (problem.layout == Layout::packed) ++packed;
  }
  EXPECT_GE(many, problems / 10);
  EXPECT_GE(plain, problems / 20);
  EXPECT_GE(ordered, problems / 75);
  EXPECT_GE(plain - ordered, problems / 75);
  EXPECT_GE(packed, 1);
}

}  // namespace
}  // namespace tilewise::test::random_mma_problem_test
