#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test::peaks_test {
namespace {

// Backward of f32 takes the states of queries from o and lse and mends the gradients of high weights
// (cuda/attention/common/backward/peaks.h). Here scores are so large that in most rows one weight is all but
// 1 and lse is rounded coarsely, with what the mending must know of: gradients of lse, sequences that are
// short, sinks.

constexpr Sizes usual{.b = 2, .hq = 4, .hkv = 2, .sq = 150, .sk = 203, .d = 64, .dv = 64};

class Peaks : public CudaKernelFixture<75>, public testing::WithParamInterface<std::string> {
 protected:
  static RandomProblem sharp_problem(std::uint64_t seed, const Sizes& sizes = usual) {
    RandomProblem problem = dense_problem(seed, DType::f32, sizes);
    std::vector<double> values = problem.q.values();
    for (double& value : values) value *= 60;
    problem.q.set_values(values);
    return problem;
  }
  static void add_gradient_of_lse(RandomProblem& problem) {
    Random rng(problem.seed + 1);
    problem.d_lse = Buffer(DType::f32, problem.statistics_shape());
    problem.d_lse.fill_random(rng, 20);
  }
  static Buffer integers(const std::vector<double>& values) {
    Buffer buffer(DType::i32, {static_cast<std::int64_t>(values.size())});
    buffer.set_values(values);
    return buffer;
  }

  static void expect_refused(const RandomProblem& problem) {
    EXPECT_NE(reason_against(problem, GetParam(), Pass::backward), "") << to_string(problem);
  }
  static void expect_within_contract(const RandomProblem& problem) {
    if (const std::string reason = reason_against(problem, GetParam(), Pass::backward); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
    SCOPED_TRACE(to_string(problem));
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = GetParam(),
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    Passes ran;
    for (const std::string& failure : checker.check(subject, &ran)) ADD_FAILURE() << failure;
    EXPECT_TRUE(ran.backward);
  }
};

TEST_P(Peaks, AreMended) {
  for (const bool own : {false, true}) {
    RandomProblem problem = sharp_problem(900);
    problem.asked.own_forward = own;
    problem.options.causal = own;
    expect_within_contract(problem);
  }
}

// So many queries that a warp has several of them.
TEST_P(Peaks, OfManyQueriesAreMended) {
  RandomProblem problem =
      sharp_problem(905, {.b = 4, .hq = 40, .hkv = 20, .sq = 128, .sk = 70, .d = 32, .dv = 32});
  problem.asked.own_forward = false;
  expect_within_contract(problem);
}

TEST_P(Peaks, AreMendedWithGradientsOfLse) {
  for (const std::int64_t dim : {32, 64, 128}) {
    Sizes sizes = usual;
    sizes.d = sizes.dv = dim;
    RandomProblem problem = sharp_problem(910 + static_cast<std::uint64_t>(dim), sizes);
    problem.asked.own_forward = false;
    add_gradient_of_lse(problem);
    expect_within_contract(problem);
  }
}

TEST_P(Peaks, OfFewKeysAreExact) {
  for (const bool sharp : {false, true}) {
    RandomProblem problem = sharp ? sharp_problem(920) : dense_problem(921, DType::f32, usual);
    problem.key_lengths = integers({8, 190});
    problem.asked.own_forward = false;
    expect_within_contract(problem);
    problem.key_lengths = integers({203, 1});
    expect_within_contract(problem);
  }
}

// Tiles of queries for more blocks than there are multiprocessors, so that each has several in turn: of 32
// queries where key heads are few, of 64 where they are many.
TEST_P(Peaks, OfFewKeysInManyTilesAreExact) {
  for (const std::int64_t key_heads : {8, 20}) {
    const Sizes sizes{
        .b = 4, .hq = key_heads == 8 ? 24 : 40, .hkv = key_heads, .sq = 128, .sk = 70, .d = 32, .dv = 32};
    RandomProblem problem = dense_problem(922, DType::f32, sizes);
    problem.key_lengths = integers({8, 70, 1, 40});
    problem.asked.own_forward = false;
    expect_within_contract(problem);
  }
}

// All weights of a row are the same then, and the math path has them without error.
TEST_P(Peaks, AreNotAllThatMattersWhereKeysAreOneRow) {
  RandomProblem problem = sharp_problem(925);
  problem.k = Buffer(DType::f32, problem.k.shape(), {.expanded = {2}});
  Random rng(926);
  problem.k.fill_random(rng);
  problem.asked.own_forward = false;
  GetParam() == "mma" ? expect_refused(problem) : expect_within_contract(problem);
}

// Weights and gradients of a row do not sum up to those of its keys where a sink has a part in them.
TEST_P(Peaks, BesideASinkAreExact) {
  RandomProblem problem = sharp_problem(930);
  problem.sinks = Buffer(DType::f32, {usual.hq});
  problem.sinks.set_values(std::vector<double>{500, 100, -3, 800});
  problem.asked.dsinks = true;
  add_gradient_of_lse(problem);
  GetParam() == "mma" ? expect_refused(problem) : expect_within_contract(problem);
}

INSTANTIATE_TEST_SUITE_P(Kernels, Peaks, testing::Values("fused", "mma"), kernel_name);

}  // namespace
}  // namespace tilewise::test::peaks_test
