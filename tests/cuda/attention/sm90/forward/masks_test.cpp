#include <gtest/gtest.h>

#include <string>

#include "cuda/attention/device_problem.h"
#include "property/check.h"
#include "support/random_parts.h"

namespace tilewise::test::masks_test {
namespace {

// Masks and dropout of `wgmma`: together with other features, with head dims above 128, and with rows that
// start anywhere. The property test has random ones.

class WgmmaMasks : public CudaKernelFixture<90, 90> {
 protected:
  static void expect_within_contract(RandomProblem problem) {
    problem.asked.backward = false;
    SCOPED_TRACE(to_string(problem));
    ASSERT_EQ(reason_against(problem, "wgmma"), "");
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = "wgmma",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
  }

  static RandomProblem problem_of(std::uint64_t seed, std::int64_t dim, std::int64_t tokens = 197) {
    const DType dtype = seed % 2 == 0 ? DType::bf16 : DType::f16;
    return dense_problem(seed, dtype,
                         {.b = 2, .hq = 4, .hkv = 2, .sq = tokens, .sk = tokens, .d = dim, .dv = dim});
  }
  static Buffer mask_of(std::uint64_t seed, DType dtype, const Shape& shape,
                        const Placement& placement = {}) {
    Random rng(seed);
    Buffer mask(dtype, shape, placement);
    mask.fill_random(rng);
    return mask;
  }
};

TEST_F(WgmmaMasks, OfOddRowsAreWithinTheContract) {
  std::uint64_t seed = 800;
  for (const std::int64_t dim : {64, 80, 192}) {
    for (const DType dtype : {DType::boolean, DType::f16, DType::f32}) {
      for (const Shape& shape :
           {Shape{2, 4, 197, 197}, Shape{197, 197}, Shape{2, 1, 1, 197}, Shape{197, 1}}) {
        RandomProblem problem = problem_of(seed, dim);
        problem.mask = mask_of(seed, dtype == DType::f16 ? problem.dtype : dtype, shape);
        problem.options.causal = seed % 3 == 0;
        expect_within_contract(problem);
        ++seed;
      }
    }
  }
}

TEST_F(WgmmaMasks, BeginAndEndAnywhere) {
  std::uint64_t seed = 850;
  for (const DType dtype : {DType::boolean, DType::bf16, DType::f32}) {
    for (const std::int64_t lead : {1, 3, 7, 9}) {
      for (const std::int64_t keys : {1, 5, 64, 127, 130}) {
        RandomProblem problem = dense_problem(
            seed, DType::bf16, {.b = 1, .hq = 4, .hkv = 2, .sq = 70, .sk = keys, .d = 64, .dv = 64});
        problem.mask = mask_of(seed, dtype, {1, 4, 70, keys}, {.lead = lead});
        expect_within_contract(problem);
        ++seed;
      }
    }
  }
}

TEST_F(WgmmaMasks, TakeEveryFeatureBesideThem) {
  std::uint64_t seed = 900;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const bool drops : {false, true}) {
      for (const bool odd : {false, true}) {
        RandomProblem problem = problem_of(seed, dim, odd ? 261 : 272);
        Random rng(seed);
        problem.mask =
            mask_of(seed, odd ? DType::f32 : problem.dtype, {2, 1, odd ? 261 : 272, odd ? 261 : 272});
        problem.sinks = mask_of(seed, DType::f32, {4});
        problem.alibi_slopes = mask_of(seed + 1, DType::f32, {2, 4});
        problem.logit_scale = mask_of(seed + 2, DType::f32, {4});
        problem.key_lengths = Buffer(DType::i32, {2});
        problem.key_lengths.set_values(std::vector<double>{200, 261});
        problem.options.softcap = dim > 128 ? 0.0f : 20.0f;
        problem.options.alignment = Alignment::bottom_right;
        problem.options.causal = true;
        if (drops) problem.options.dropout = {.probability = 0.3f, .seed = seed};
        expect_within_contract(problem);
        ++seed;
      }
    }
  }
}

TEST_F(WgmmaMasks, OfPaddingAreWithinTheContract) {
  std::uint64_t seed = 970;
  for (const std::int64_t dim : {64, 128, 192}) {
    for (const std::int64_t tokens : {320, 197, 700}) {
      const Sizes sizes{.b = 5, .hq = 2, .hkv = 1, .sq = 130, .sk = tokens, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16, sizes);
      problem.mask = with_aligned_rows(padding_mask_of(seed, 5, tokens));
      problem.options.causal = seed % 3 == 0;
      problem.options.alignment = Alignment::bottom_right;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaMasks, MayComeWithPaddingAsABlockMask) {
  std::uint64_t seed = 990;
  for (const std::int64_t dim : {32, 128, 256}) {
    for (const std::int64_t tokens : {256, 133}) {
      for (const bool odd : {false, true}) {
        const Sizes sizes{.b = 5, .hq = 4, .hkv = 4, .sq = tokens, .sk = tokens, .d = dim, .dv = dim};
        RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16, sizes);
        problem.mask =
            odd ? padding_mask_of(seed + 1, 5, tokens) : mask_of(seed, problem.dtype, {4, tokens, tokens});
        problem.blocks = padding_blocks_of(seed, problem);
        expect_within_contract(problem);
        ++seed;
      }
    }
  }
}

TEST_F(WgmmaMasks, AreChosen) {
  RandomProblem problem = problem_of(950, 64, 192);
  problem.mask = mask_of(950, DType::f32, {192, 192});
  EXPECT_EQ(chosen_kernel(problem, Pass::forward), "wgmma");
  problem.options.softcap = 5;
  EXPECT_EQ(chosen_kernel(problem, Pass::forward), "wgmma");
  problem.options.softcap = 0;
  problem.mask = mask_of(950, DType::f32, {192, 192}, {.lead = 1});
  EXPECT_EQ(chosen_kernel(problem, Pass::forward), "wgmma");
  problem = problem_of(951, 192, 192);
  problem.mask = mask_of(951, DType::f32, {192, 192});
  EXPECT_EQ(chosen_kernel(problem, Pass::forward), "wgmma");
}

TEST_F(WgmmaMasks, OfOtherKindsAreRefused) {
  RandomProblem problem = problem_of(960, 64);
  problem.mask = mask_of(960, DType::f32, {197, 197}, {.order = {1, 0}});
  EXPECT_EQ(reason_against(problem, "wgmma"), "needs a mask whose last dimension is contiguous or broadcast");
  problem = problem_of(961, 192);
  problem.mask = mask_of(961, DType::f32, {197, 197});
  problem.options.softcap = 5;
  EXPECT_EQ(reason_against(problem, "wgmma"), "supports head dims up to 128 with softcap, got 192");
}

}  // namespace
}  // namespace tilewise::test::masks_test
