#include <gtest/gtest.h>

#include <string>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test::fused_short_test {
namespace {

// The kernel of `fused` for few keys at large head dims. Random problems are too small for it: it is taken
// where blocks of 64 queries have one round, and smaller ones would need a second. On GPUs that have many
// more multiprocessors than an H200, or far fewer, others of fused's kernels are tested.

constexpr Sizes usual{.b = 5, .hq = 6, .hkv = 3, .sq = 230, .sk = 256, .d = 128, .dv = 128};

class FusedShort : public CudaKernelFixture<75> {
 protected:
  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = "fused",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
  }
};

TEST_F(FusedShort, IsWithinTheContract) { expect_within_contract(dense_problem(800, DType::f32, usual)); }

TEST_F(FusedShort, TakesSizesThatFillNoTile) {
  Sizes sizes = usual;
  sizes.sq = 193;
  sizes.sk = 255;
  expect_within_contract(dense_problem(810, DType::f32, sizes));
  sizes.sk = 131;
  sizes.d = 96;
  sizes.dv = 52;
  expect_within_contract(dense_problem(811, DType::f32, sizes));
}

TEST_F(FusedShort, HidesWhatAWindowHides) {
  std::uint64_t seed = 820;
  Sizes sizes = usual;
  sizes.sk = 180;  // fewer keys than queries: some see none
  for (const Alignment alignment : {Alignment::top_left, Alignment::bottom_right}) {
    RandomProblem problem = dense_problem(seed++, DType::f32, sizes);
    problem.options.window = {.left = 30, .right = 40};
    problem.options.alignment = alignment;
    expect_within_contract(problem);
  }
}

TEST_F(FusedShort, TakesANegativeScale) {
  RandomProblem problem = dense_problem(830, DType::f32, usual);
  problem.options.scale = -0.2f;
  expect_within_contract(problem);
}

}  // namespace
}  // namespace tilewise::test::fused_short_test
