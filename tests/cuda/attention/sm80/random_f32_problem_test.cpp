#include <gtest/gtest.h>

#include <cstdint>

#include "attention/validate.h"
#include "cuda/attention/common/f32/limits.h"
#include "cuda/attention/device_problem.h"
#include "cuda/attention/sm80/backward_f32/backward.h"

// Whether the problems drawn for mma in f32 are ones that it takes. No device is asked.
namespace tilewise::test::random_mma_f32_problem_test {
namespace {

constexpr int problems = 150;

TEST(RandomMmaF32Problem, NearlyAllAreTakenForwardAndMostBackward) {
  int forward = 0;
  int backward = 0;
  int packed = 0;
  int lengths = 0;
  for (std::uint64_t seed = 1; seed <= problems; ++seed) {
    const RandomProblem p = random_mma_f32_problem(seed);
    const OutputBuffers outputs = make_outputs(p);
    const GradientBuffers gradients = make_gradients(p);
    const AttentionProblem problem =
        checked_backward(p.inputs(), p.options, backward_arguments(p, outputs, gradients), Context{}).problem;
    if (!cuda::mma_f32::unsuited(problem).empty()) continue;
    ++forward;
    // As supports_f32_backward (src/cuda/attention/sm80/kernels.cpp) has it.
    const bool taken = problem.length_q >= cuda::mma_f32::few_backward_queries && !problem.features.sinks &&
                       problem.backward.aligned_rows && !problem.backward.deterministic &&
                       !problem.backward.repeated_keys && problem.dim_qk % 4 == 0 && problem.dim_v % 4 == 0 &&
                       problem.dim_qk <= 128 && problem.dim_v <= 128 && p.asked.dq && p.asked.dk &&
                       p.asked.dv;
    if (!taken) continue;
    ++backward;
    if (problem.layout == Layout::packed) ++packed;
    if (problem.features.key_lengths) ++lengths;
  }
  EXPECT_GE(forward, problems * 3 / 4);
  EXPECT_GE(backward, problems / 2);
  EXPECT_GE(packed, problems / 20);
  EXPECT_GE(lengths, problems / 20);
}

}  // namespace
}  // namespace tilewise::test::random_mma_f32_problem_test
