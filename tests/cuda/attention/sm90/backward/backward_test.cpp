#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "cuda/attention/sm90/backward/splits.h"
#include "property/check.h"
#include "support/random_parts.h"

namespace tilewise::test::wgmma_backward_test {
namespace {

// tilewise_property has a domain for wgmma's backward. Here each of its rows of tiles has its turn, with few
// keys and results, with keys that blocks share, and with weights near 1.

class WgmmaBackward : public CudaKernelFixture<90, 90> {
 protected:
  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    ASSERT_EQ(reason_against(problem, "wgmma", Pass::backward), "");
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = "wgmma",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
  }
};

TEST_F(WgmmaBackward, IsWithinTheContractAtEveryHeadDim) {
  std::uint64_t seed = 500;
  for (const std::int64_t dim : {8, 40, 64, 72, 128}) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      RandomProblem problem = dense_problem(
          seed++, dtype, {.b = 1, .hq = 4, .hkv = 2, .sq = 140, .sk = 270, .d = dim, .dv = dim});
      problem.options.causal = dtype == DType::f16;
      expect_within_contract(problem);
    }
  }
}

TEST_F(WgmmaBackward, OfFewKeysAndResultsIsWithinTheContract) {
  std::uint64_t seed = 520;
  for (const std::int64_t keys : {2, 3, 17, 64, 65}) {
    for (const std::int64_t dim : {64, 128}) {
      const Sizes sizes{.b = 1, .hq = 2, .hkv = 1, .sq = 70, .sk = keys, .d = dim, .dv = dim};
      expect_within_contract(dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16, sizes));
      ++seed;
    }
  }
}

// Rows in which one weight is all but 1, and all of which look at the same key.
TEST_F(WgmmaBackward, OfHighWeightsIsWithinTheContract) {
  for (const std::int64_t dim : {64, 128}) {
    const Sizes sizes{.b = 1, .hq = 4, .hkv = 2, .sq = 130, .sk = 200, .d = dim, .dv = dim};
    RandomProblem problem = dense_problem(540, DType::bf16, sizes);
    const double part = std::sqrt(8 * std::sqrt(static_cast<double>(dim)));
    for (std::int64_t h = 0; h < sizes.hq; ++h) {
      for (std::int64_t i = 0; i < sizes.sq; ++i) problem.q.set({0, h, i, 0}, part);
    }
    for (std::int64_t h = 0; h < sizes.hkv; ++h) {
      for (std::int64_t j = 0; j < sizes.sk; ++j) problem.k.set({0, h, j, 0}, j == 3 ? part : 0);
    }
    expect_within_contract(problem);
  }
}

// Sinks, padding and block masks, by rows of tiles without other features. Some entries show no key.
TEST_F(WgmmaBackward, OfSinksPaddingAndBlockMasksIsWithinTheContract) {
  std::uint64_t seed = 2000;
  constexpr int sinks = 1, padding = 2, blocks = 4;
  const std::pair<std::int64_t, std::vector<int>> cases[] = {
      {64, {sinks, padding, blocks, sinks + padding + blocks}},
      {96, {sinks + padding}},
      {128, {sinks, padding, sinks + blocks, padding + blocks}},
      {192, {padding, blocks}},
      {256, {sinks + padding, padding + blocks}}};
  for (const auto& [dim, all] : cases) {
    for (const int with : all) {
      const Sizes sizes{.b = 5, .hq = 2, .hkv = 1, .sq = 140, .sk = 300, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16, sizes);
      problem.options.deterministic = seed % 3 == 0;
      if ((with & sinks) != 0) {
        problem.sinks = Buffer(DType::f32, {sizes.hq});
        Random rng(seed);
        problem.sinks.fill_random(rng);
        problem.asked.dsinks = true;
        problem.options.causal = true;
        problem.options.alignment = Alignment::bottom_right;
        problem.options.window = {.left = 200, .right = {}};
      }
      if ((with & padding) != 0) problem.mask = padding_mask_of(seed, sizes.b, sizes.sk);
      if ((with & blocks) != 0) {
        Random rng(seed + 1);
        problem.blocks.block_q = problem.blocks.block_k = 128;
        make_blocks(rng, problem);
      }
      expect_within_contract(problem);
      ++seed;
    }
  }
}

// Up to head dim 64 and above 128 with the plain schedule, together with sinks and padding.
TEST_F(WgmmaBackward, OfDropoutIsWithinTheContract) {
  std::uint64_t seed = 2050;
  for (const std::int64_t dim : {32, 64, 128, 256}) {
    for (const bool more : {false, true}) {
      const Sizes sizes{.b = 5, .hq = 4, .hkv = 2, .sq = 140, .sk = 300, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16, sizes);
      problem.options.dropout = {.probability = 0.3f, .seed = seed};
      problem.options.causal = more;
      problem.options.deterministic = more;
      if (more) {
        problem.sinks = Buffer(DType::f32, {sizes.hq});
        Random rng(seed);
        problem.sinks.fill_random(rng);
        problem.asked.dsinks = true;
        problem.mask = padding_mask_of(seed, sizes.b, sizes.sk);
      }
      expect_within_contract(problem);
      ++seed;
    }
  }
}

// A scale below 0 turns the order of scores round, and hidden ones must stay hidden.
TEST_F(WgmmaBackward, OfPaddingAndABlockMaskTakesANegativeScale) {
  std::uint64_t seed = 2100;
  for (const std::int64_t dim : {64, 128, 256}) {
    const Sizes sizes{.b = 5, .hq = 2, .hkv = 1, .sq = 140, .sk = 300, .d = dim, .dv = dim};
    RandomProblem problem = dense_problem(seed++, DType::bf16, sizes);
    problem.options.scale = -0.1f;
    problem.mask = padding_mask_of(seed, sizes.b, sizes.sk);
    Random rng(seed + 1);
    problem.blocks.block_q = problem.blocks.block_k = 128;
    make_blocks(rng, problem);
    expect_within_contract(problem);
  }
}

// Blocks too small for the tiles of calls without other features.
TEST_F(WgmmaBackward, OfSmallMaskBlocksIsWithinTheContract) {
  const Sizes sizes{.b = 2, .hq = 4, .hkv = 2, .sq = 140, .sk = 300, .d = 64, .dv = 64};
  RandomProblem problem = dense_problem(2110, DType::bf16, sizes);
  Random rng(2111);
  problem.blocks.block_q = 64;
  problem.blocks.block_k = 128;
  make_blocks(rng, problem);
  expect_within_contract(problem);
}

// One key tile, so several CTAs share it: by query heads of the group, or by queries where there is one head.
TEST_F(WgmmaBackward, SharesFewKeyTiles) {
  std::uint64_t seed = 570;
  for (const std::int64_t group : {1, 6, 8}) {
    for (const std::int64_t dim : {64, 96, 128, 192}) {
      for (const bool deterministic : {false, true}) {
        const Sizes sizes{
            .b = 1, .hq = group, .hkv = 1, .sq = group == 1 ? 3000 : 500, .sk = 100, .d = dim, .dv = dim};
        RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16, sizes);
        problem.options.deterministic = deterministic;
        problem.options.causal = dim == 96;
        expect_within_contract(problem);
        ++seed;
      }
    }
  }
  const Sizes sizes{.b = 2, .hq = 8, .hkv = 2, .sq = 400, .sk = 140, .d = 64, .dv = 64};
  RandomProblem problem = featured_problem(seed, DType::bf16, sizes);
  problem.asked.dmask = false;
  expect_within_contract(problem);
}

TEST(WgmmaBackwardSplits, AreChosenWhereKeyTilesAreFew) {
  using namespace cuda::wgmma_backward;
  const Config& c = Configs::rows[2];
  AttentionProblem problem{.pass = Pass::backward, .dtype = DType::bf16, .dim_qk = 128, .dim_v = 128};
  const auto splits = [&](std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv,
                          std::int64_t length) {
    problem.batch = batch;
    problem.heads_q = heads_q;
    problem.heads_kv = heads_kv;
    problem.length_q = problem.length_k = problem.most_keys = length;
    problem.queries = problem.keys = batch * length;
    return splits_of(problem, c, 132);
  };
  EXPECT_EQ(splits(8, 16, 16, 4096), Splits{});  // enough key tiles
  EXPECT_GT(splits(1, 64, 8, 512).heads, 1);     // 32 key tiles
  EXPECT_EQ(splits(1, 64, 8, 512).heads * splits(1, 64, 8, 512).queries, splits(1, 64, 8, 512).count());
  EXPECT_GT(splits(1, 4, 4, 1024).queries, 1);
  EXPECT_EQ(splits(1, 6, 1, 300).heads, 6);
  EXPECT_EQ(splits(1, 2, 2, 64), Splits{});  // it would take longer
  problem.batch_invariant = true;
  EXPECT_EQ(splits(1, 64, 8, 512), Splits{});  // they depend on the batch
}

TEST_F(WgmmaBackward, SaysWhatItDoesNotTake) {
  const Sizes sizes{.b = 1, .hq = 2, .hkv = 1, .sq = 70, .sk = 80, .d = 64, .dv = 64};
  RandomProblem problem = dense_problem(550, DType::bf16, sizes);
  problem.options.precision = Precision::strict;
  EXPECT_NE(reason_against(problem, "wgmma", Pass::backward).find("strict"), std::string::npos);
  problem = dense_problem(551, DType::bf16, sizes);
  problem.options.causal = true;
  problem.options.window = {.left = 0, .right = {}};
  EXPECT_NE(reason_against(problem, "wgmma", Pass::backward).find("at least 2 keys"), std::string::npos);
}

// docs/wgmma_backward.md and docs/numerics.md say which calls are whose.
TEST_F(WgmmaBackward, IsWhatAutoTakesButForWhatThePagesName) {
  const Sizes many{.b = 8, .hq = 16, .hkv = 16, .sq = 70, .sk = 132, .d = 64, .dv = 64};  // keys for all SMs
  const auto chosen = [&](const std::function<void(RandomProblem&)>& change, DType dtype = DType::bf16,
                          std::optional<Sizes> sizes = {}) {
    RandomProblem problem = dense_problem(560, dtype, sizes.value_or(many));
    change(problem);
    return chosen_kernel(problem, Pass::backward);
  };
  const auto with_mask = [&](std::int64_t batch) {
    return [=](RandomProblem& p) {
      p.mask = Buffer(DType::bf16, {batch, many.hq, many.sq, many.sk});
      p.asked.dmask = true;
    };
  };
  EXPECT_EQ(chosen([](RandomProblem&) {}), "wgmma");
  EXPECT_EQ(chosen([](RandomProblem& p) { p.options.deterministic = true; }), "wgmma");
  EXPECT_EQ(chosen([](RandomProblem& p) { p.options.dropout.probability = 0.1f; }, DType::f16), "wgmma");
  EXPECT_EQ(chosen([](RandomProblem& p) { p.options.softcap = 30; }), "wgmma");
  EXPECT_EQ(chosen(with_mask(many.b)), "wgmma");
  EXPECT_EQ(chosen(with_mask(1)), "wgmma");  // pairs share the mask
  EXPECT_EQ(chosen([&](RandomProblem& p) { p.logit_scale = Buffer(DType::f32, {many.hq}); }), "mma");
  EXPECT_EQ(chosen([](RandomProblem&) {}, DType::bf16, Sizes{.b = 1, .sq = 70, .sk = 132, .d = 64, .dv = 64}),
            "wgmma");  // few keys
  const Sizes long_rows{.b = 8, .hq = 16, .hkv = 16, .sq = 200, .sk = 200, .d = 64, .dv = 64};
  EXPECT_EQ(chosen([](RandomProblem& p) { p.options.precision = Precision::strict; }, DType::f16, long_rows),
            "widened");
  EXPECT_EQ(chosen([](RandomProblem&) {}, DType::f32, long_rows), "mma");
  EXPECT_EQ(chosen([](RandomProblem& p) { p.options.deterministic = true; }, DType::f32, long_rows), "fused");
}

// Without asking for it: dk and dv are summed in one order. dq need not be.
class KeyGradients : public CudaKernelTest {};

TEST_P(KeyGradients, HaveTheSameBitsEachTime) {
  const Stream stream;
  for (const std::int64_t dim : {64, 128}) {
    for (const std::int64_t heads : {1, 8}) {  // blocks share keys, or need not
      const Sizes sizes{.b = heads, .hq = 8, .hkv = heads, .sq = 300, .sk = 340, .d = dim, .dv = dim};
      for (const DType dtype : {DType::f16, DType::bf16}) {
        RandomProblem problem = dense_problem(560, dtype, sizes);
        problem.options.causal = true;
        ASSERT_EQ(reason_against(problem, GetParam(), Pass::backward), "");
        const DeviceProblem on_device(problem, GetParam(), Bits::any);
        std::vector<std::byte> dk, dv;
        for (int run = 0; run < 4; ++run) {
          on_device.run(stream);
          const OutputBuffers outputs = make_outputs(problem);
          const GradientBuffers gradients = make_gradients(problem);
          on_device.download(backward_arguments(problem, outputs, gradients));
          if (run == 0) {
            dk = gradients.dk.bytes();
            dv = gradients.dv.bytes();
          }
          EXPECT_TRUE(gradients.dk.bytes() == dk && gradients.dv.bytes() == dv) << dim << ' ' << heads;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, KeyGradients, testing::Values("mma", "wgmma"), kernel_name);

}  // namespace
}  // namespace tilewise::test::wgmma_backward_test
