#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/device_problem.h"
#include "property/check.h"

namespace tilewise::test {
namespace {

// Random problems seldom have what `wgmma` is for: many results, aligned rows, and nothing but a band that
// hides. Here each head dim it is compiled for has its turn, with lengths around its tiles, with blocks that
// have many tiles each, and with scores that make the softmax start anew all the time.

class WgmmaForward : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const std::string reason = reason_against(dense_problem(1, DType::bf16), "wgmma");
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    ASSERT_EQ(reason_against(problem, "wgmma"), "");
    const Checker checker(problem, 4);
    const Subject subject{.kernel = "wgmma",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
  }

  static DType dtype_of(std::uint64_t seed) { return seed % 2 == 0 ? DType::bf16 : DType::f16; }
};

TEST_F(WgmmaForward, IsWithinTheContractAtEveryHeadDim) {
  std::uint64_t seed = 200;
  for (const std::int64_t dim : {8, 40, 64, 72, 96, 128, 136, 192, 200, 256}) {
    for (const bool causal : {false, true}) {
      const Sizes sizes{.b = 2, .hq = 6, .hkv = 3, .sq = 197, .sk = 261, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), sizes);
      problem.options.causal = causal;
      problem.options.alignment = seed % 3 == 0 ? Alignment::bottom_right : Alignment::top_left;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, TakesOtherHeadDimsOfValues) {
  std::uint64_t seed = 230;
  for (const auto& [dim, dim_v] : {std::pair{192, 128}, {64, 128}, {128, 64}, {40, 104}, {256, 72}}) {
    const Sizes sizes{.b = 1, .hq = 4, .hkv = 2, .sq = 150, .sk = 200, .d = dim, .dv = dim_v};
    expect_within_contract(dense_problem(seed, dtype_of(seed), sizes));
    ++seed;
  }
}

TEST_F(WgmmaForward, TakesLengthsAroundItsTiles) {
  std::uint64_t seed = 240;
  for (const std::int64_t queries : {1, 63, 64, 65, 127, 129, 191, 192, 193, 385}) {
    for (const std::int64_t keys : {1, 15, 16, 79, 80, 81, 127, 128, 129, 241}) {
      const Sizes sizes{.b = 1, .hq = 64, .hkv = 8, .sq = queries, .sk = keys, .d = 64, .dv = 64};
      Sizes of_seed = sizes;
      if (seed % 3 != 0) of_seed.d = of_seed.dv = seed % 3 == 1 ? 128 : 256;
      of_seed.hq = of_seed.hkv * (1 + 4096 / (8 * queries * of_seed.dv));
      RandomProblem problem = dense_problem(seed, dtype_of(seed), of_seed);
      problem.options.causal = seed % 4 != 0;
      problem.options.alignment = seed % 4 == 1 ? Alignment::top_left : Alignment::bottom_right;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, TakesWindows) {
  std::uint64_t seed = 350;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const auto& [left, right] : {std::pair{0, 0}, {5, 0}, {100, 30}, {0, 200}, {300, 300}}) {
      const Sizes sizes{.b = 1, .hq = 4, .hkv = 2, .sq = 400, .sk = 330, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), sizes);
      problem.options.window = {.left = left, .right = right};
      problem.options.alignment = seed % 2 == 0 ? Alignment::top_left : Alignment::bottom_right;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, OfBlocksWithManyTilesIsWithinTheContract) {
  std::uint64_t seed = 380;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      const Sizes sizes{.b = 3, .hq = 52, .hkv = 4, .sq = 200, .sk = 100, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), sizes);
      problem.options.causal = causal;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, IsWithinTheContractHoweverScoresRise) {
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      const Sizes sizes{.b = 1, .hq = 2, .hkv = 1, .sq = 133, .sk = 1100, .d = dim, .dv = dim};
      const auto with_keys = [&](std::uint64_t seed, const auto& size_of_key) {
        RandomProblem problem = dense_problem(seed, dtype, sizes);
        for (std::int64_t j = 0; j < sizes.sk; ++j) {
          for (std::int64_t d = 0; d < dim; ++d) {
            problem.k.set({0, 0, j, d}, problem.k.at(0, 0, j, d) * size_of_key(j));
          }
        }
        expect_within_contract(problem);
      };
      with_keys(400, [](std::int64_t) { return 8.0; });  // few keys have all the weight
      with_keys(401, [](std::int64_t j) { return 0.01 * static_cast<double>(j); });
      with_keys(402, [](std::int64_t j) { return 0.01 * static_cast<double>(1100 - j); });
      with_keys(403, [](std::int64_t) { return 0.0; });  // equal scores
      RandomProblem negative = dense_problem(404, dtype, sizes);
      negative.q.fill(1);
      negative.k.fill(-3);
      expect_within_contract(negative);
    }
  }
}

TEST_F(WgmmaForward, TakesRowsOfAlignedStrides) {
  // Tokens first, as projections have it: [B, S, H, D].
  const Sizes n{.b = 2, .hq = 4, .hkv = 2, .sq = 150, .sk = 170, .d = 64, .dv = 64};
  RandomProblem problem = dense_problem(420, DType::bf16, n);
  Random rng(421);
  const Placement tokens_first{.order = {0, 2, 1, 3}};
  problem.q = Buffer(problem.dtype, {n.b, n.hq, n.sq, n.d}, tokens_first);
  problem.k = Buffer(problem.dtype, {n.b, n.hkv, n.sk, n.d}, tokens_first);
  problem.v = Buffer(problem.dtype, {n.b, n.hkv, n.sk, n.dv}, {.expanded = {0}});
  for (Buffer* buffer : {&problem.q, &problem.k, &problem.v}) buffer->fill_random(rng);
  expect_within_contract(problem);
}

TEST_F(WgmmaForward, SaysWhyItCannot) {
  const Sizes n{.b = 2, .hq = 4, .hkv = 2, .sq = 70, .sk = 131, .d = 36, .dv = 24};
  EXPECT_NE(reason_against(dense_problem(1, DType::bf16, n), "wgmma").find("16 bytes"), std::string::npos);
  EXPECT_NE(reason_against(featured_problem(1, DType::bf16), "wgmma"), "");
  EXPECT_NE(reason_against(dense_problem(1, DType::f32), "wgmma"), "");
  EXPECT_NE(reason_against(dense_problem(1, DType::bf16, {.sq = 1}), "wgmma"), "");
}

TEST_F(WgmmaForward, GivesTheSameBitsInManyLaunches) {
  std::deque<DeviceProblem> problems;
  const Stream streams[2];
  std::vector<std::vector<std::byte>> first;
  for (const std::int64_t dim : {64, 128}) {
    const Sizes sizes{.b = 2, .hq = 40, .hkv = 8, .sq = 300, .sk = 500, .d = dim, .dv = dim};
    RandomProblem problem = dense_problem(430, DType::bf16, sizes);
    problem.options.causal = dim == 64;
    first.push_back(problems.emplace_back(problem, "wgmma").run(streams[0]));
  }
  for (int launch = 0; launch < 1000; ++launch) {
    for (std::size_t n = 0; n < 2; ++n) problems[n].forward(streams[n]);
  }
  for (std::size_t n = 0; n < 2; ++n) {
    streams[n].wait();
    EXPECT_TRUE(problems[n].results() == first[n]);
  }
}

}  // namespace
}  // namespace tilewise::test
