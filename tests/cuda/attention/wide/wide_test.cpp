#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"
#include "support/garbage.h"
#include "support/random_parts.h"

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

// `wide_batched`: several heads in one product.
class WideBatched : public CudaKernelFixture<90, 90> {
 protected:
  static constexpr Sizes heads{.b = 2, .hq = 4, .hkv = 2, .sq = 130, .sk = 150, .d = 256, .dv = 264};

  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    ASSERT_EQ(reason_against(problem, "wide_batched"), "");
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = "wide_batched",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
  }
  static RandomProblem block_problem(std::uint64_t seed, const Sizes& n, std::int64_t block_q,
                                     std::int64_t block_k) {
    RandomProblem problem = dense_problem(seed, DType::f32, n);
    Random rng(seed + 1);
    problem.blocks.block_q = block_q;
    problem.blocks.block_k = block_k;
    make_blocks(rng, problem);
    return problem;
  }
  static std::vector<double> output(const RandomProblem& problem) {
    const OutputBuffers outputs = make_outputs(problem);
    AttentionOptions options = problem.options;
    options.kernel = "wide_batched";
    run_forward_on_cuda(problem.inputs(), options, outputs.view(), {.device = first_device});
    return outputs.o.values();
  }
};

// Numbers of K and Q that f16 parts cannot hold: where one is large, the other is small.
TEST_F(WideBatched, IsExactWhereNumbersDifferInSize) {
  RandomProblem problem = dense_problem(750, DType::f32, heads);
  const auto shrink = [](Buffer& buffer, std::size_t dim, bool first_half) {
    std::vector<double> values = buffer.values();
    for (std::size_t n = 0; n < values.size(); ++n) {
      if ((n % dim < dim / 2) == first_half) values[n] *= 1e-7;
    }
    buffer.set_values(values);
  };
  shrink(problem.q, heads.d, true);
  shrink(problem.k, heads.d, false);
  problem.options.scale = 1e5f;
  expect_within_contract(problem);
}

// Rows of entries lie between those of others, so that no stride leads from one entry's heads to the next's.
TEST_F(WideBatched, TakesEntriesThatLieApart) {
  RandomProblem problem = dense_problem(751, DType::f32, heads);
  for (Buffer* buffer : {&problem.q, &problem.k, &problem.v, &problem.d_o}) {
    const std::vector<double> values = buffer->values();
    *buffer = Buffer(DType::f32, buffer->shape(), {.order = {0, 2, 1, 3}});
    buffer->set_values(values);
  }
  expect_within_contract(problem);
}

// Several tiles of 128 x 128 pairs are hidden, with several chunks of rows on the emulator.
TEST_F(WideBatched, HidesWhatIsHidden) {
  Sizes sizes{.b = 1, .hq = 2, .hkv = 1, .sq = 400, .sk = 0, .d = 136, .dv = 144};
  std::uint64_t seed = 760;
  for (const std::int64_t keys : {300, 460}) {
    sizes.sk = keys;
    for (const Alignment alignment : {Alignment::top_left, Alignment::bottom_right}) {
      RandomProblem problem = dense_problem(seed++, DType::f32, sizes);
      problem.options.causal = true;
      problem.options.alignment = alignment;
      expect_within_contract(problem);
    }
    RandomProblem problem = dense_problem(seed++, DType::f32, sizes);
    problem.options.window = {.left = 30, .right = 40};
    expect_within_contract(problem);
  }
}

// P is 1, and O and dV are copies. In f32 they have no error.
TEST_F(WideBatched, IsExactWhereAQuerySeesOneKey) {
  for (std::uint64_t seed = 810; seed < 813; ++seed) {
    RandomProblem problem =
        dense_problem(seed, DType::f32, {.b = 1, .hq = 1, .hkv = 1, .sq = 500, .sk = 500, .d = 136, .dv = 4});
    problem.options.causal = true;
    problem.options.window = {.left = 0, .right = 63};
    expect_within_contract(problem);
  }
}

// Few tiles with long sums, over keys and over queries: K is cut into slices.
TEST_F(WideBatched, CutsLongSums) {
  std::uint64_t seed = 795;
  for (const auto& [queries, keys] : {std::pair(130, 1056), std::pair(1056, 130)}) {
    RandomProblem problem = dense_problem(
        seed++, DType::f32, {.b = 1, .hq = 1, .hkv = 1, .sq = queries, .sk = keys, .d = 132, .dv = 132});
    expect_within_contract(problem);
    problem.options.causal = true;
    problem.options.alignment = Alignment::bottom_right;
    expect_within_contract(problem);
  }
}

TEST_F(WideBatched, TakesBlockMasks) {
  const Sizes sizes{.b = 1, .hq = 4, .hkv = 2, .sq = 300, .sk = 290, .d = 136, .dv = 144};
  std::uint64_t seed = 780;
  for (const auto& [block_q, block_k] : {std::pair(128, 128), std::pair(100, 64), std::pair(8, 200)}) {
    RandomProblem problem = block_problem(seed++, sizes, block_q, block_k);
    expect_within_contract(problem);
    problem.options.causal = true;
    expect_within_contract(problem);
  }
}

// No product reads K and V where no block is listed.
TEST_F(WideBatched, DoesNotReadHiddenBlocks) {
  const Sizes sizes{.b = 1, .hq = 2, .hkv = 2, .sq = 300, .sk = 384, .d = 160, .dv = 160};
  RandomProblem problem = dense_problem(790, DType::f32, sizes);
  RandomBlocks& blocks = problem.blocks;
  blocks.block_q = blocks.block_k = 128;
  blocks.counts = Buffer(DType::i32, {1, 1, 3});
  blocks.counts.set_values(std::vector<double>{2, 1, 0});
  blocks.indices = Buffer(DType::i32, {1, 1, 3, 2});
  blocks.indices.set_values(std::vector<double>{0, 2, 2, 0, 0, 0});
  const std::vector<double> before = output(problem);
  for (Buffer* buffer : {&problem.k, &problem.v}) {
    std::vector<double> values = buffer->values();
    for (std::size_t n = 0; n < values.size(); ++n) {
      if (static_cast<std::int64_t>(n) / sizes.d % sizes.sk / 128 == 1) values[n] = HUGE_VAL;
    }
    buffer->set_values(values);
  }
  const std::vector<double> after = output(problem);
  for (std::size_t n = 0; n < after.size(); ++n) {
    ASSERT_NEAR(after[n], before[n], 1e-5) << n;
    if (static_cast<std::int64_t>(n) / sizes.dv % sizes.sq >= 256) {
      ASSERT_EQ(after[n], 0) << n;
    }
  }
}

TEST_F(WideBatched, GarbageInBlockListsStaysInsideTensors) {
  const Sizes sizes{.b = 2, .hq = 2, .hkv = 1, .sq = 300, .sk = 290, .d = 136, .dv = 144};
  for (std::uint64_t seed = 800; seed < 806; ++seed) {
    const RandomProblem problem = garbled(block_problem(seed, sizes, seed % 2 == 0 ? 128 : 31, 100));
    SCOPED_TRACE(to_string(problem));
    ASSERT_EQ(reason_against(problem, "wide_batched"), "");
    EXPECT_NO_THROW(output(problem));
  }
}

// A key that only the last query sees has a value with which f16 parts of the others would be too inexact.
TEST_F(WideBatched, IsExactWhereAHiddenKeyIsLarge) {
  Sizes sizes = heads;
  sizes.b = 1;
  sizes.sq = sizes.sk = 300;
  RandomProblem problem = dense_problem(770, DType::f32, sizes);
  problem.options.causal = true;
  const std::vector<double> before = output(problem);
  std::vector<double> v = problem.v.values();  // [1, heads, keys, dv]
  for (std::size_t n = 0; n < v.size(); ++n) {
    const auto key = static_cast<std::int64_t>(n) / sizes.dv % sizes.sk;
    if (key + 1 == sizes.sk) v[n] *= 1e12;
  }
  problem.v.set_values(v);
  const std::vector<double> after = output(problem);
  for (std::size_t n = 0; n < after.size(); ++n) {
    const auto query = static_cast<std::int64_t>(n) / sizes.dv % sizes.sq;
    if (query + 1 < sizes.sq) {
      ASSERT_NEAR(after[n], before[n], 1e-5) << n;
    }
  }
}

TEST_F(WideBatched, KeepsAnInfinityInItsHead) {
  RandomProblem problem = dense_problem(752, DType::f32, heads);
  const std::vector<double> before = output(problem);
  std::vector<double> v = problem.v.values();
  constexpr std::int64_t head = 2, key = 77, dim = 5;  // of the heads of all entries
  v[static_cast<std::size_t>((head * heads.sk + key) * heads.dv + dim)] = HUGE_VAL;
  problem.v.set_values(v);
  const std::vector<double> after = output(problem);
  ASSERT_EQ(after.size(), before.size());
  for (std::size_t n = 0; n < after.size(); ++n) {
    const auto at = static_cast<std::int64_t>(n);
    const bool own = at / (heads.dv * heads.sq) / (heads.hq / heads.hkv) == head;
    if (own && at % heads.dv == dim) {
      ASSERT_EQ(after[n], HUGE_VAL) << n;
    } else {
      ASSERT_NEAR(after[n], before[n], own ? 1e-5 : 0.0) << n;
    }
  }
}

}  // namespace
}  // namespace tilewise::test::wide_test
