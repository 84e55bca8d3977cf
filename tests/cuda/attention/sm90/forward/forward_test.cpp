#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test::forward_test {
namespace {

// Random problems seldom have what `wgmma` is for: many results and aligned rows. Here each head dim it is
// compiled for has its turn, with lengths around its tiles, with blocks that have many tiles each, and with
// scores that make the softmax start anew all the time.

class WgmmaForward : public CudaKernelFixture<90, 90> {
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
};

TEST_F(WgmmaForward, IsWithinTheContractAtEveryHeadDim) {
  std::uint64_t seed = 200;
  for (const std::int64_t dim : {16, 40, 64, 72, 96, 128, 136, 192, 200, 256}) {
    for (const bool causal : {false, true}) {
      const std::int64_t keys = dim > 192 ? 900 : 133;  // large head dims want many pairs
      const Sizes sizes{.b = 1, .hq = 6, .hkv = 3, .sq = 197, .sk = keys, .d = dim, .dv = dim};
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
    const std::int64_t keys = dim > 192 ? 900 : 200;
    const Sizes sizes{.b = 1, .hq = 8, .hkv = 4, .sq = 150, .sk = keys, .d = dim, .dv = dim_v};
    expect_within_contract(dense_problem(seed, dtype_of(seed), sizes));
    ++seed;
  }
}

TEST_F(WgmmaForward, TakesLengthsAroundItsTiles) {
  std::uint64_t seed = 240;
  for (const std::int64_t queries : {17, 63, 64, 65, 127, 129, 191, 192, 193, 385}) {
    for (const std::int64_t keys : {1, 15, 16, 79, 80, 81, 127, 128, 129, 241}) {
      Sizes of_seed{.b = 1, .hkv = 1, .sq = queries, .sk = keys, .d = 64, .dv = 64};
      if (seed % 3 != 0) of_seed.d = of_seed.dv = seed % 3 == 1 ? 128 : 192;
      of_seed.hq = 1 + (of_seed.d == 192 ? 1024 / queries : 16384 / (queries * of_seed.dv));
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
  for (const std::int64_t dim : {64, 128, 192}) {
    for (const auto& [left, right] : {std::pair{0, 0}, {5, 0}, {100, 30}, {0, 130}, {190, 190}}) {
      const Sizes sizes{.b = 1, .hq = 4, .hkv = 2, .sq = 260, .sk = 210, .d = dim, .dv = dim};
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
      const Sizes sizes{.b = 3, .hq = 104, .hkv = 8, .sq = 33, .sk = 110, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), sizes);
      problem.options.causal = causal;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, OfBlocksWithManyTilesTakesWindows) {
  std::uint64_t seed = 390;
  for (const std::int64_t dim : {64, 128, 192}) {
    for (const auto& [left, right] : {std::pair{0, 0}, {70, 0}, {100, 30}}) {
      const Sizes sizes{.b = 2, .hq = 96, .hkv = 4, .sq = 140, .sk = 130, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), sizes);
      problem.options.window = {.left = left, .right = right};
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, OfBlocksWithManyTilesTakesWindowsOfManyKeys) {
  std::uint64_t seed = 400;
  for (const auto& [left, right] : {std::pair{1300, 0}, {1100, 200}}) {
    const Sizes sizes{.b = 1, .hq = 70, .hkv = 10, .sq = 230, .sk = 1700, .d = 128, .dv = 128};
    RandomProblem problem = dense_problem(seed, dtype_of(seed), sizes);
    problem.options.window = {.left = left, .right = right};
    problem.options.alignment = Alignment::bottom_right;
    expect_within_contract(problem);
    ++seed;
  }
}

TEST_F(WgmmaForward, OfBlocksWithLongAndShortRowsIsWithinTheContract) {
  std::uint64_t seed = 405;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const std::int64_t queries : {449, 830}) {
      const Sizes sizes{.b = 1, .hq = 4, .hkv = 2, .sq = queries, .sk = 700, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), sizes);
      problem.options.causal = true;
      problem.options.alignment = seed % 2 == 0 ? Alignment::bottom_right : Alignment::top_left;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, IsWithinTheContractHoweverScoresRise) {
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      const Sizes sizes{
          .b = 4, .hq = 2, .hkv = 1, .sq = dim == 256 ? 270 : 70, .sk = 500, .d = dim, .dv = dim};
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
      with_keys(401, [](std::int64_t j) { return 0.02 * static_cast<double>(j); });
      with_keys(402, [](std::int64_t j) { return 0.02 * static_cast<double>(500 - j); });
      with_keys(403, [](std::int64_t) { return 0.0; });  // equal scores
      RandomProblem negative = dense_problem(404, dtype, sizes);
      if (dim <= 128) {
        negative.q.fill(1);
        negative.k.fill(-3);
      } else {  // such sums are mended for what they lose on average; of equal numbers they lose nothing
        std::vector<double> queries = negative.q.values();
        std::vector<double> keys = negative.k.values();
        for (std::size_t n = 0; n < keys.size(); ++n) keys[n] = -queries[n % static_cast<std::size_t>(dim)];
        for (auto n = static_cast<std::size_t>(dim); n < queries.size(); ++n)
          queries[n] = queries[n % static_cast<std::size_t>(dim)];
        negative.q.set_values(queries);
        negative.k.set_values(keys);
      }
      expect_within_contract(negative);
    }
  }
}

TEST_F(WgmmaForward, TakesProblemsOfItsDomain) {
  constexpr int problems = 100;
  int taken = 0;
  for (std::uint64_t seed = 500; seed < 500 + problems; ++seed) {
    const RandomProblem problem = random_wgmma_problem(seed);
    if (!reason_against(problem, "wgmma").empty()) continue;
    expect_within_contract(problem);
    ++taken;
  }
  EXPECT_GT(taken, problems * 3 / 4);
}

/// Random, with elements and whole rows hidden by -inf or by the lowest finite number of the mask's type;
/// rows begin at multiples of 16 elements.
Buffer random_mask(std::uint64_t seed, DType dtype, const Shape& shape) {
  Random rng(seed);
  Buffer mask(dtype, shape, {.padding = {0, 0, 0, (16 - shape[3] % 16) % 16}});
  mask.fill_random(rng);
  const double lowest = dtype == DType::f16 ? -65504.0 : dtype == DType::bf16 ? -0x1.FEp127 : -0x1.FFFFFEp127;
  const double hidden = -std::numeric_limits<double>::infinity();
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      for (std::int64_t i = 0; i < shape[2]; ++i) {
        const bool row = rng.chance(0.05);
        const bool finite = rng.chance(0.5);
        for (std::int64_t j = 0; j < shape[3]; ++j) {
          const bool hide = row || rng.chance(0.2);
          if (dtype == DType::boolean) {
            mask.set({b, h, i, j}, hide ? 0 : 1);
          } else if (hide) {
            mask.set({b, h, i, j}, finite ? lowest : hidden);
          }
        }
      }
    }
  }
  return mask;
}

TEST_F(WgmmaForward, TakesMasks) {
  std::uint64_t seed = 460;
  for (const std::int64_t dim : {64, 128}) {
    for (const std::int64_t keys : {176, 333}) {
      const Sizes n{.b = 2, .hq = 4, .hkv = 2, .sq = 150, .sk = keys, .d = dim, .dv = dim};
      for (const Shape& shape : {Shape{n.b, n.hq, n.sq, n.sk}, {1, 1, n.sq, n.sk}, {n.b, 1, 1, n.sk}}) {
        const DType dtype = dtype_of(seed);
        for (const DType mask : {DType::boolean, dtype, DType::f32}) {
          RandomProblem problem = dense_problem(seed, dtype, n);
          problem.mask = random_mask(seed + 1, mask, shape);
          problem.options.causal = seed % 3 == 0;
          expect_within_contract(problem);
          ++seed;
        }
      }
    }
  }
}

TEST_F(WgmmaForward, TakesDropout) {
  std::uint64_t seed = 492;
  for (const std::int64_t dim : {64, 128}) {
    const Sizes n{.b = 2, .hq = 4, .hkv = 2, .sq = 150, .sk = 333, .d = dim, .dv = dim};
    for (const bool masked : {false, true}) {
      RandomProblem problem = dense_problem(seed, dtype_of(seed), n);
      if (masked) problem.mask = random_mask(seed + 1, DType::boolean, {n.b, 1, n.sq, n.sk});
      problem.options.causal = !masked;
      problem.options.dropout = {.probability = 0.3f, .seed = seed, .offset = 5};
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, TakesMasksInBlocksWithManyTiles) {
  std::uint64_t seed = 495;
  for (const std::int64_t dim : {64, 128}) {
    for (const bool causal : {false, true}) {
      const Sizes n{.b = 3, .hq = 104, .hkv = 8, .sq = 65, .sk = 110, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), n);
      problem.mask = random_mask(seed + 1, dtype_of(seed), {1, n.hq, n.sq, n.sk});
      problem.options.causal = causal;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, TakesFeaturesTogether) {
  std::uint64_t seed = 440;
  for (const std::int64_t dim : {64, 128, 192}) {
    for (const bool softcap : {false, true}) {
      if (softcap && dim == 192) continue;
      const Sizes n{.b = 3, .hq = 4, .hkv = 2, .sq = 150, .sk = 333, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), n);
      Random rng(seed + 1);
      problem.options.causal = true;
      problem.options.alignment = Alignment::bottom_right;
      problem.options.window.left = 200;
      problem.options.softcap = softcap ? 5.0f : 0.0f;
      problem.sinks = Buffer(DType::f32, {n.hq});
      problem.alibi_slopes = Buffer(DType::f32, {n.b, n.hq});
      problem.sinks.fill_random(rng);
      problem.alibi_slopes.fill_random(rng, 0.1);
      problem.key_lengths = Buffer(DType::i32, {n.b});
      problem.key_lengths.set_values(std::vector<double>{0, 333, 129});
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, TakesManyPackedSequences) {
  // More sequences than blocks, and a long one among short ones and empty ones.
  constexpr std::int64_t sequences = 300;
  constexpr std::int64_t longest = 517;
  Random rng(451);
  std::vector<double> ends = {0};
  for (std::int64_t n = 0; n < sequences; ++n) {
    const std::int64_t length = n == 200 ? longest : rng.between(0, 9);
    ends.push_back(ends.back() + static_cast<double>(length));
  }
  const auto total = static_cast<std::int64_t>(ends.back());
  RandomProblem problem = dense_problem(450, DType::bf16);
  problem.layout = Layout::packed;
  problem.batch = sequences;
  problem.heads_q = 2;
  problem.heads_kv = 1;
  problem.length_q = problem.length_k = longest;
  problem.dim_qk = problem.dim_v = 64;
  problem.q = Buffer(problem.dtype, {total, 2, 64});
  problem.k = Buffer(problem.dtype, {total, 1, 64});
  problem.v = Buffer(problem.dtype, {total, 1, 64});
  problem.d_o = Buffer(problem.dtype, {total, 2, 64});
  for (Buffer* buffer : {&problem.q, &problem.k, &problem.v, &problem.d_o}) buffer->fill_random(rng);
  for (Buffer* buffer : {&problem.cumulative_q, &problem.cumulative_k}) {
    *buffer = Buffer(DType::i32, {sequences + 1});
    buffer->set_values(ends);
  }
  problem.options.causal = true;
  problem.asked.backward = false;
  expect_within_contract(problem);
}

TEST_F(WgmmaForward, TakesHeadsThatShareKeysInOneTile) {
  std::uint64_t seed = 460;
  for (const std::int64_t group : {4, 8, 16, 64}) {
    for (const std::int64_t queries : {5, 16, 33, 70}) {
      if (group * queries < 64) continue;
      const std::int64_t dim = seed % 2 == 0 ? 64 : 128;
      const std::int64_t entries = 1 + 16384 / (2 * group * queries * dim);
      const Sizes sizes{
          .b = entries, .hq = 2 * group, .hkv = 2, .sq = queries, .sk = 300, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), sizes);
      problem.options.causal = seed % 3 != 0;
      problem.options.alignment = Alignment::bottom_right;
      if (seed % 4 == 0) problem.options.window.left = 77;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, JoinsSharesOfKeys) {
  std::uint64_t seed = 480;
  for (const std::int64_t dim : {64, 128}) {
    for (const bool sinks : {false, true}) {
      const Sizes n{.b = 2, .hq = 4, .hkv = 2, .sq = 70, .sk = 2500, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), n);
      problem.options.causal = true;
      problem.options.alignment = Alignment::bottom_right;
      problem.key_lengths = Buffer(DType::i32, {n.b});
      problem.key_lengths.set_values(std::vector<double>{40, 2500});  // shares of which some see nothing
      if (sinks) {
        Random rng(seed);
        problem.sinks = Buffer(DType::f32, {n.hq});
        problem.sinks.fill_random(rng);
      }
      expect_within_contract(problem);
      ++seed;
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

TEST_F(WgmmaForward, WritesResultsOfAnyStrides) {
  // Those that have no map leave by way of shared memory as well, in other steps.
  std::uint64_t seed = 430;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (int problems = 0; problems < 4; ++problems) {
      const Sizes n{.b = 2, .hq = 4, .hkv = 2, .sq = 197, .sk = 900, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, dtype_of(seed), n);
      problem.aligned_results = false;
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(WgmmaForward, SaysWhyItCannot) {
  const Sizes n{.b = 2, .hq = 4, .hkv = 2, .sq = 170, .sk = 131, .d = 36, .dv = 24};
  EXPECT_NE(reason_against(dense_problem(1, DType::bf16, n), "wgmma").find("16 bytes"), std::string::npos);
  EXPECT_NE(reason_against(dense_problem(1, DType::f32), "wgmma"), "");
  RandomProblem masked = dense_problem(1, DType::bf16, {.hq = 8, .sq = 256, .sk = 256, .d = 64, .dv = 64});
  masked.mask = Buffer(DType::f32, {256, 256}, {.order = {1, 0}});
  EXPECT_NE(reason_against(masked, "wgmma").find("contiguous or broadcast"), std::string::npos);
  RandomProblem few = dense_problem(1, DType::bf16, {.sq = 20});
  EXPECT_EQ(reason_against(few, "wgmma"), "");
  few.options.precision = Precision::strict;
  EXPECT_NE(reason_against(few, "wgmma").find("too inexact"), std::string::npos);
  EXPECT_NE(reason_against(dense_problem(1, DType::bf16, {.hq = 192, .hkv = 64, .sq = 16}), "wgmma")
                .find("16 queries"),
            std::string::npos);
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
  for (int round = 0; round < 10; ++round) {
    for (std::size_t n = 0; n < 2; ++n) problems[n].poison(streams[n]);
    for (int launch = 0; launch < 500; ++launch) {
      for (std::size_t n = 0; n < 2; ++n) {
        problems[n].forward(streams[n]);
        problems[n].backward(streams[n]);
      }
    }
    for (std::size_t n = 0; n < 2; ++n) {
      streams[n].wait();
      EXPECT_TRUE(problems[n].results() == first[n]) << round;
    }
  }
}

}  // namespace
}  // namespace tilewise::test::forward_test
