#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"
#include "support/garbage.h"
#include "support/random_parts.h"

namespace tilewise::test::blocks_test {
namespace {

// Block masks of `wgmma`.

class WgmmaBlocks : public CudaKernelFixture<90, 90> {
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

  static DType dtype_of(std::uint64_t seed) { return seed % 2 == 0 ? DType::bf16 : DType::f16; }

  /// Random lists of blocks of these sizes, and random tiles of aligned rows.
  static RandomProblem block_problem(std::uint64_t seed, const Sizes& n, std::int64_t block_q = 128,
                                     std::int64_t block_k = 128) {
    RandomProblem problem = dense_problem(seed, dtype_of(seed), n);
    Random rng(seed + 1);
    problem.blocks.block_q = block_q;
    problem.blocks.block_k = block_k;
    make_blocks(rng, problem);
    if (problem.blocks.tiles.given()) problem.blocks.tiles = with_aligned_rows(problem.blocks.tiles);
    return problem;
  }
};

TEST_F(WgmmaBlocks, AreWithinTheContractAtEveryHeadDim) {
  std::uint64_t seed = 600;
  for (const std::int64_t dim : {40, 64, 128, 192, 256}) {
    for (const bool causal : {false, true}) {
      Sizes sizes{.b = 2, .hq = 2, .hkv = 1, .sq = 300, .sk = 397, .d = dim, .dv = dim};
      if (dim > 192) sizes = {.b = 2, .hq = 16, .hkv = 2, .sq = 260, .sk = 200, .d = dim, .dv = dim};
      RandomProblem problem = block_problem(seed, sizes);
      problem.options.causal = causal;
      problem.options.alignment = seed % 3 == 0 ? Alignment::bottom_right : Alignment::top_left;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaBlocks, TakeLengthsAroundBlocks) {
  std::uint64_t seed = 620;
  for (const std::int64_t queries : {65, 127, 128, 129, 257}) {
    for (const std::int64_t keys : {1, 127, 128, 129, 513}) {
      const Sizes sizes{.b = 1, .hq = 4, .hkv = 2, .sq = queries, .sk = keys, .d = 64, .dv = 64};
      expect_within_contract(block_problem(seed, sizes));
      ++seed;
    }
  }
}

TEST_F(WgmmaBlocks, TakeBlocksOfSeveralTilesAndOfAllQueriesAndKeys) {
  std::uint64_t seed = 650;
  const Sizes sizes{.b = 1, .hq = 2, .hkv = 1, .sq = 520, .sk = 1000, .d = 128, .dv = 128};
  for (const std::int64_t block_q : {128, 256, 520, 4096}) {
    for (const std::int64_t block_k : {128, 384, 1000, 4096}) {
      expect_within_contract(block_problem(seed, sizes, block_q, block_k));
      ++seed;
    }
  }
}

TEST_F(WgmmaBlocks, TakeWindows) {
  std::uint64_t seed = 670;
  for (const std::int64_t dim : {64, 128}) {
    for (const auto& [left, right] : {std::pair{0, 0}, {100, 30}, {300, 0}}) {
      const Sizes sizes{.b = 1, .hq = 2, .hkv = 2, .sq = 400, .sk = 500, .d = dim, .dv = dim};
      RandomProblem problem = block_problem(seed, sizes);
      problem.options.window = {.left = left, .right = right};
      expect_within_contract(problem);
      ++seed;
    }
  }
}

// More rows of query blocks than there are multiprocessors, so that a CTA has several, and short ones.
TEST_F(WgmmaBlocks, AreWithinTheContractWhereCtasHaveManyRows) {
  std::uint64_t seed = 680;
  for (const std::int64_t dim : {64, 128}) {
    const Sizes sizes{.b = 4, .hq = 64, .hkv = 8, .sq = 140, .sk = 260, .d = dim, .dv = dim};
    expect_within_contract(block_problem(seed, sizes));
    ++seed;
  }
}

TEST_F(WgmmaBlocks, OfRowsWithoutBlocksGiveZeros) {
  const Sizes sizes{.b = 1, .hq = 2, .hkv = 1, .sq = 300, .sk = 300, .d = 64, .dv = 64};
  RandomProblem problem = block_problem(690, sizes);
  for (const bool all : {false, true}) {
    for (Buffer* counts : {&problem.blocks.counts, &problem.blocks.full_counts}) {
      if (!counts->given()) continue;
      std::vector<double> numbers = counts->values();
      for (std::size_t n = 0; n < numbers.size(); ++n) {
        if (all || n % 3 == 1) numbers[n] = 0;
      }
      counts->set_values(numbers);
    }
    expect_within_contract(problem);
  }
}

TEST_F(WgmmaBlocks, TakeOtherFeaturesBesideThem) {
  std::uint64_t seed = 670;
  for (const std::int64_t dim : {64, 128, 192}) {
    const Sizes sizes{.b = 2, .hq = 2, .hkv = 1, .sq = 300, .sk = 397, .d = dim, .dv = dim};
    RandomProblem problem = block_problem(seed, sizes);
    Random rng(seed + 2);
    problem.sinks = Buffer(DType::f32, {2});
    problem.alibi_slopes = Buffer(DType::f32, {2, 2});
    problem.logit_scale = Buffer(DType::f32, {2});
    for (Buffer* values : {&problem.sinks, &problem.alibi_slopes, &problem.logit_scale})
      values->fill_random(rng);
    problem.key_lengths = Buffer(DType::i32, {2});
    problem.key_lengths.set_values(std::vector<double>{397, 170});
    problem.options.causal = true;
    problem.options.alignment = Alignment::bottom_right;
    if (dim <= 128) {
      problem.options.softcap = 20;
      problem.options.dropout = {.probability = 0.3f, .seed = seed};
    }
    expect_within_contract(problem);
    ++seed;
  }
}

TEST_F(WgmmaBlocks, OfGarbageStayInsideTheirTensors) {
  int taken = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const RandomProblem problem = garbled(random_wgmma_block_problem(seed));
    SCOPED_TRACE(to_string(problem));
    if (!reason_against(problem, "wgmma").empty()) continue;
    ++taken;
    AttentionOptions options = problem.options;
    options.kernel = "wgmma";
    const OutputBuffers outputs = make_outputs(problem);
    EXPECT_NO_THROW(run_forward_on_cuda(problem.inputs(), options, outputs.view()));
  }
  EXPECT_GE(taken, 15);
}

TEST_F(WgmmaBlocks, AreChosen) {
  const Sizes sizes{.b = 1, .hq = 2, .hkv = 1, .sq = 300, .sk = 300, .d = 64, .dv = 64};
  EXPECT_EQ(chosen_kernel(block_problem(700, sizes), Pass::forward), "wgmma");
}

TEST_F(WgmmaBlocks, OfOtherKindsAreRefused) {
  const Sizes sizes{.b = 1, .hq = 2, .hkv = 1, .sq = 300, .sk = 300, .d = 64, .dv = 64};
  const std::string multiples =
      "needs mask blocks in multiples of 128 queries and keys, or of the whole length, got ";
  EXPECT_EQ(reason_against(block_problem(710, sizes, 64, 128), "wgmma"), multiples + "64 x 128");
  EXPECT_EQ(reason_against(block_problem(710, sizes, 128, 192), "wgmma"), multiples + "128 x 192");
  RandomProblem problem = block_problem(711, sizes);
  problem.mask = Buffer(DType::boolean, {300, 300});
  EXPECT_EQ(reason_against(problem, "wgmma"), "supports only padding as a block mask together with a mask");
  problem = block_problem(711, {.b = 1, .hq = 4, .hkv = 1, .sq = 300, .sk = 300, .d = 192, .dv = 192});
  problem.options.dropout = {.probability = 0.5f, .seed = 1};
  EXPECT_EQ(reason_against(problem, "wgmma"),
            "supports head dims up to 128 with a block mask and dropout, got 192");
  problem = block_problem(711, sizes, 300, 300);
  problem.blocks.tiles = Buffer(DType::boolean, {1, 300, 300});
  problem.blocks.tile_ids = Buffer(DType::i32, problem.blocks.indices.shape());
  EXPECT_EQ(reason_against(problem, "wgmma"),
            "needs contiguous rows of block-mask tiles that start at multiples of 16 bytes");
}

}  // namespace
}  // namespace tilewise::test::blocks_test
