#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test::wide_test {
namespace {

// Head dims past those of tiles. Random problems are too small for it: its heads must be worth their
// launches.

constexpr Sizes usual{.b = 1, .hq = 2, .hkv = 1, .sq = 130, .sk = 430, .d = 320, .dv = 288};

class Wide : public CudaKernelFixture<75> {
 protected:
  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    ASSERT_EQ(reason_against(problem, "wide"), "");
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = "wide",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
  }
};

class WideOf : public Wide, public testing::WithParamInterface<std::tuple<std::int64_t, DType>> {};

TEST_P(WideOf, IsWithinTheContract) {
  const auto [dim, dtype] = GetParam();
  Sizes sizes = usual;
  sizes.d = dim;
  sizes.dv = dim == 516 ? 300 : dim;
  sizes.sk = 36'000'000 / sizes.sq / (sizes.d + sizes.dv);  // as few as it takes
  expect_within_contract(dense_problem(700 + static_cast<std::uint64_t>(dim), dtype, sizes));
}

INSTANTIATE_TEST_SUITE_P(HeadDims, WideOf,
                         testing::Combine(testing::Values(257, 320, 516, 1024, 4096),
                                          testing::Values(DType::f32, DType::f16, DType::bf16)));

TEST_F(Wide, HidesWhatIsHidden) {
  std::uint64_t seed = 720;
  Sizes sizes = usual;
  sizes.sq = 600;  // more than a chunk of rows where a band hides keys
  sizes.sk = 100;
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const Alignment alignment : {Alignment::top_left, Alignment::bottom_right}) {
      RandomProblem problem = dense_problem(seed++, dtype, sizes);  // more queries than keys: some see none
      problem.options.causal = true;
      problem.options.alignment = alignment;
      expect_within_contract(problem);
    }
    RandomProblem problem = dense_problem(seed++, dtype, sizes);
    problem.options.window = {.left = 30, .right = 40};
    expect_within_contract(problem);
  }
}

TEST_F(Wide, TakesWhatChangesScores) {
  std::uint64_t seed = 730;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    RandomProblem problem = featured_problem(seed, dtype, usual);
    problem.asked.dmask = false;
    expect_within_contract(problem);
    problem = dense_problem(seed + 1, dtype, usual);
    problem.options.softcap = 2.5f;
    expect_within_contract(problem);
    seed += 2;
  }
}

TEST_F(Wide, LeavesSmallHeadsToOthers) {
  Sizes small = usual;
  small.sq = 40;
  EXPECT_NE(reason_against(dense_problem(740, DType::f32, small), "wide"), "");
  RandomProblem problem = featured_problem(741, DType::f32, usual);
  EXPECT_EQ(reason_against(problem, "wide", Pass::forward), "");
  EXPECT_NE(reason_against(problem, "wide", Pass::backward), "");
}

}  // namespace
}  // namespace tilewise::test::wide_test
