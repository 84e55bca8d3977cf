#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "cuda/attention/sm80/backward_f32/backward.h"
#include "cuda/runtime/device.h"
#include "property/check.h"

namespace tilewise::test::widened_test {
namespace {

// f16 and bf16 in strict precision, by the f32 kernels.

class Widened : public CudaKernelFixture<80> {
 protected:
  static RandomProblem strict_problem(std::uint64_t seed, std::int64_t dim = 64) {
    RandomProblem problem =
        dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16,
                      {.b = 2, .hq = 4, .hkv = 2, .sq = 140, .sk = 203, .d = dim, .dv = dim});
    problem.options.precision = Precision::strict;
    return problem;
  }
  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    const std::string reason = reason_against(problem, "widened", Pass::backward);
    // Backward in f32 by mma has room for head dims to 128 on 9.0, and to 64 on 8.0.
    const std::size_t needed = cuda::mma_f32::backward_shared_bytes(problem.q.shape().back());
    if (cuda::device_properties(first_device.index).shared_bytes < needed) {
      EXPECT_NE(reason.find("bytes of shared memory"), std::string::npos) << reason;
      return;
    }
    ASSERT_EQ(reason, "");
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = "widened",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    Passes ran;
    for (const std::string& failure : checker.check(subject, &ran)) ADD_FAILURE() << failure;
    EXPECT_TRUE(ran.forward && ran.backward);
  }
};

TEST_F(Widened, IsWithinTheStrictContract) {
  std::uint64_t seed = 600;
  for (const std::int64_t dim : {32, 64, 128}) {
    for (const bool causal : {false, true}) {
      RandomProblem problem = strict_problem(seed++, dim);
      problem.options.causal = causal;
      expect_within_contract(problem);
    }
  }
}

// Rows in which one weight is all but 1: of their gradients, 16-bit products would leave little.
TEST_F(Widened, IsWithinTheStrictContractWhereFewKeysHaveAllTheWeight) {
  for (const std::uint64_t seed : {610, 611}) {
    RandomProblem problem = strict_problem(seed);
    std::vector<double> values = problem.q.values();
    for (double& value : values) value *= 10;
    problem.q.set_values(values);
    expect_within_contract(problem);
  }
}

TEST_F(Widened, GivesEachGradientWithoutTheOthers) {
  for (int without = 0; without < 3; ++without) {
    RandomProblem problem = strict_problem(620 + static_cast<std::uint64_t>(without));
    (without == 0 ? problem.asked.dq : without == 1 ? problem.asked.dk : problem.asked.dv) = false;
    expect_within_contract(problem);
  }
}

// Rows that lie apart, and some that all heads or entries share.
TEST_F(Widened, ReadsAndWritesAnyStrides) {
  RandomProblem problem = strict_problem(630);
  const auto again = [&](Buffer& buffer, const Placement& placement) {
    buffer = Buffer(problem.dtype, buffer.shape(), placement);
    Random rng(631);
    buffer.fill_random(rng);
  };
  again(problem.q, {.order = {0, 2, 1, 3}});
  again(problem.k, {.expanded = {0}});
  again(problem.v, {.order = {2, 0, 1, 3}});
  expect_within_contract(problem);
}

TEST_F(Widened, SaysWhatItDoesNotTake) {
  RandomProblem problem = strict_problem(640);
  problem.options.precision = Precision::standard;
  EXPECT_NE(reason_against(problem, "widened", Pass::backward).find("strict precision"), std::string::npos);
  problem = strict_problem(641);
  problem.options.deterministic = true;
  EXPECT_NE(reason_against(problem, "widened", Pass::backward).find("not deterministic"), std::string::npos);
  problem.options.deterministic = false;
  problem.options.softcap = 5;
  EXPECT_NE(reason_against(problem, "widened", Pass::backward), "");
}

}  // namespace
}  // namespace tilewise::test::widened_test
