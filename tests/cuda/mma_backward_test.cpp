#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/device_problem.h"
#include "property/check.h"

namespace tilewise::test {
namespace {

// Random problems are seldom large enough for the backward of `mma`, which leaves few keys and few results to
// `fused`. Here each of its head dims has its turn, with what its exactness hangs on: weights near 1, several
// high ones in a row, and numbers of any size.

class MmaBackward : public CudaKernelFixture<80> {
 protected:
  static RandomProblem plain_problem(std::uint64_t seed, std::int64_t dim = 64) {
    return dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16,
                         {.b = 2, .hq = 4, .hkv = 2, .sq = 150, .sk = 203, .d = dim, .dv = dim});
  }

  static void multiply(Buffer& buffer, double factor) {
    std::vector<double> values = buffer.values();
    for (double& value : values) value *= factor;
    buffer.set_values(values);
  }

  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    ASSERT_EQ(reason_against(problem, "mma", Pass::backward), "");
    const Checker checker(problem, 4);
    const Subject subject{.kernel = "mma",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
  }
};

TEST_F(MmaBackward, IsWithinTheContractAtEveryHeadDim) {
  std::uint64_t seed = 200;
  for (const std::int64_t dim : {40, 64, 72, 96, 128, 136, 192, 256}) {
    for (const bool causal : {false, true}) {
      RandomProblem problem = plain_problem(seed, dim);
      problem.options.causal = causal;
      problem.options.alignment = seed % 3 == 0 ? Alignment::top_left : Alignment::bottom_right;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

// Scores of deviation up to 30: rows in which one weight is all but 1, and rows in which two or three are
// high.
TEST_F(MmaBackward, IsWithinTheContractWhereFewKeysHaveAllTheWeight) {
  std::uint64_t seed = 230;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const double deviation : {3.0, 10.0, 30.0}) {
      RandomProblem problem = plain_problem(seed++, dim);
      multiply(problem.q, deviation);
      problem.d_lse = Buffer(DType::f32, {problem.batch, problem.heads_q, problem.length_q});
      Random rng(seed);
      problem.d_lse.fill_random(rng);
      expect_within_contract(problem);
    }
  }
}

// f16 alone cannot hold the score gradients of these.
TEST_F(MmaBackward, IsWithinTheContractWhateverTheSizeOfGradients) {
  for (const double size : {1e-4, 1e-2, 1e2, 1e3}) {
    for (const std::uint64_t seed : {250, 251}) {
      RandomProblem problem = plain_problem(seed);
      multiply(problem.d_o, size);
      expect_within_contract(problem);
    }
  }
}

TEST_F(MmaBackward, OfManyQueriesIsWithinTheContract) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    RandomProblem problem =
        dense_problem(260, dtype, {.b = 1, .hq = 2, .hkv = 1, .sq = 2100, .sk = 133, .d = 64, .dv = 64});
    expect_within_contract(problem);
    problem.options.window = {.left = 30, .right = 100};
    expect_within_contract(problem);
  }
}

TEST_F(MmaBackward, GivesEachGradientWithoutTheOthers) {
  for (int without = 0; without < 3; ++without) {
    RandomProblem problem = plain_problem(270 + static_cast<std::uint64_t>(without));
    (without == 0 ? problem.asked.dq : without == 1 ? problem.asked.dk : problem.asked.dv) = false;
    multiply(problem.q, 5);
    expect_within_contract(problem);
  }
}

TEST_F(MmaBackward, SaysWhatItDoesNotTake) {
  RandomProblem problem = plain_problem(280);
  problem.options.softcap = 5;
  EXPECT_NE(reason_against(problem, "mma", Pass::backward), "");
  EXPECT_NE(reason_against(deterministic(plain_problem(281)), "mma", Pass::backward), "");
  EXPECT_NE(reason_against(plain_problem(282, 30), "mma", Pass::backward), "");
}

}  // namespace
}  // namespace tilewise::test
