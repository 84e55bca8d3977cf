#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test::fused_test {
namespace {

// The large tiles of `fused`, which random problems are too small for: they are taken where blocks of 128
// queries, or half as many key tiles, fill the GPU. Heads are as many as that takes on this one. f32 goes to
// the plain kernels, bf16 to the general ones. A GPU that has too little shared memory for them takes others.

class FusedTiles : public CudaKernelFixture<75>, public testing::WithParamInterface<std::tuple<DType, bool>> {
 protected:
  /// So many heads that their blocks of 128 queries, one a head, are that share of the multiprocessors. Of 97
  /// to 128 queries tiles of 64 would be two a head, and those of 32 four.
  static std::int64_t heads_for(double share) {
    const int multiprocessors = cuda::device_properties(first_device.index).multiprocessors;
    return static_cast<std::int64_t>(share * multiprocessors) / 2 * 2 + 2;
  }
  static Sizes sizes_of(std::int64_t heads, std::int64_t queries, std::int64_t keys, std::int64_t dim,
                        std::int64_t dim_v) {
    return {.b = 1, .hq = heads, .hkv = heads / 2, .sq = queries, .sk = keys, .d = dim, .dv = dim_v};
  }
  static RandomProblem problem_of(std::uint64_t seed, const Sizes& sizes) {
    const auto [dtype, causal] = GetParam();
    RandomProblem problem = dense_problem(seed, dtype, sizes);
    problem.options.causal = causal;
    problem.options.alignment = Alignment::bottom_right;
    return problem;
  }

  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    ASSERT_EQ(reason_against(problem, "fused"), "");
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = "fused",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    Passes ran;
    for (const std::string& failure : checker.check(subject, &ran)) ADD_FAILURE() << failure;
    EXPECT_TRUE(ran.forward);
    EXPECT_EQ(ran.backward, problem.asked.backward);
  }
};

TEST_P(FusedTiles, OfHeadDimsTo64AreWithinTheContract) {
  expect_within_contract(problem_of(850, sizes_of(heads_for(0.75), 97, 140, 64, 64)));
}

// With causal, tiles of 64 queries are done sooner until there are 1.7 blocks of 128 a multiprocessor.
TEST_P(FusedTiles, OfHeadDimsTo128AreWithinTheContract) {
  const bool causal = std::get<1>(GetParam());
  const std::int64_t heads = heads_for(causal ? 1.8 : 0.75);
  expect_within_contract(problem_of(860, sizes_of(heads, 97, 70, 128, 128)));
  expect_within_contract(problem_of(861, sizes_of(heads, 97, 66, 72, 100)));
}

// From 1024 keys on the plain forward takes 96 of them at a time. Backward is as with fewer.
TEST_P(FusedTiles, OfManyKeysAreWithinTheContract) {
  RandomProblem problem = problem_of(870, sizes_of(heads_for(0.75), 97, 1030, 128, 64));
  problem.asked.backward = false;
  expect_within_contract(problem);
}

std::string type_and_band(const testing::TestParamInfo<FusedTiles::ParamType>& info) {
  const bool causal = std::get<1>(info.param);
  return std::string(to_string(std::get<0>(info.param))) + (causal ? "_causal" : "");
}

INSTANTIATE_TEST_SUITE_P(TypesAndBands, FusedTiles,
                         testing::Combine(testing::Values(DType::f32, DType::bf16), testing::Bool()),
                         type_and_band);

}  // namespace
}  // namespace tilewise::test::fused_test
