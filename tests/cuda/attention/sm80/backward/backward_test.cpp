#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test::mma_backward_test {
namespace {

// Random problems are small; tilewise_property has a domain of larger ones. Here each head dim has its turn,
// with what is hard to round: weights near 1, several high ones in a row, and numbers of any size; and each
// feature.

class MmaBackward : public CudaKernelFixture<80> {
 protected:
  static RandomProblem plain_problem(std::uint64_t seed, std::int64_t dim = 64, std::int64_t batch = 1) {
    return dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16,
                         {.b = batch, .hq = 4, .hkv = 2, .sq = 140, .sk = 270, .d = dim, .dv = dim});
  }

  /// Of many results, so that there is little luck in their largest error.
  static RandomProblem large_problem(std::uint64_t seed, std::int64_t dim = 64) {
    const std::int64_t rows = 8 * 70;  // of a batch entry
    return dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16,
                         {.b = (std::int64_t{1} << 18) / (rows * dim) + 1,
                          .hq = 8,
                          .hkv = 8,
                          .sq = 70,
                          .sk = 140,
                          .d = dim,
                          .dv = dim});
  }

  static Buffer random_buffer(std::uint64_t seed, DType dtype, const Shape& shape, double size = 1) {
    Buffer buffer(dtype, shape);
    Random rng(seed);
    buffer.fill_random(rng, size);
    return buffer;
  }
  static Sizes sizes_of(const RandomProblem& p) {
    return {.b = p.batch,
            .hq = p.heads_q,
            .hkv = p.heads_kv,
            .sq = p.length_q,
            .sk = p.length_k,
            .d = p.dim_qk,
            .dv = p.dim_v};
  }
  static void multiply(Buffer& buffer, double factor) {
    std::vector<double> values = buffer.values();
    for (double& value : values) value *= factor;
    buffer.set_values(values);
  }

  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    ASSERT_EQ(reason_against(problem, "mma", Pass::backward), "");
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = "mma",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
  }
};

TEST_F(MmaBackward, IsWithinTheContractAtEveryHeadDim) {
  std::uint64_t seed = 200;
  for (const std::int64_t dim : {40, 64, 72, 96, 128, 136, 192, 256}) {
    for (const bool causal : {false, true}) {
      for (RandomProblem problem : {plain_problem(seed, dim), large_problem(seed, dim)}) {
        problem.options.causal = causal;
        problem.options.alignment = seed % 3 == 0 ? Alignment::top_left : Alignment::bottom_right;
        expect_within_contract(problem);
      }
      ++seed;
    }
  }
}

// Scores of deviation up to 30: rows in which one weight is all but 1, and rows in which two or three are
// high.
TEST_F(MmaBackward, IsWithinTheContractWhereFewKeysHaveAllTheWeight) {
  std::uint64_t seed = 230;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const double deviation : {3.0, 10.0, 30.0}) {
      for (RandomProblem problem : {plain_problem(seed, dim), large_problem(seed, dim)}) {
        multiply(problem.q, deviation);
        problem.d_lse = Buffer(DType::f32, {problem.batch, problem.heads_q, problem.length_q});
        Random rng(++seed);
        problem.d_lse.fill_random(rng);
        expect_within_contract(problem);
      }
    }
  }
}

// f16 alone cannot hold the score gradients of these.
TEST_F(MmaBackward, IsWithinTheContractWhateverTheSizeOfGradients) {
  for (const double size : {1e-4, 1e-2, 1e2, 1e3}) {
    for (const std::uint64_t seed : {250, 251}) {
      RandomProblem problem = plain_problem(seed);
      multiply(problem.d_o, size);
      expect_within_contract(problem);
    }
  }
}

// What rounding takes from few terms shows in few results. Sequences of 65 tokens; about a tile; what dropout
// leaves of 342 keys; the same weight for all queries.
TEST_F(MmaBackward, OfFewTermsIsWithinTheContract) {
  std::uint64_t seed = 255;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Sizes& sizes : {Sizes{.b = 4, .hq = 3, .hkv = 3, .sq = 65, .sk = 65, .d = 96, .dv = 96},
                               Sizes{.b = 1, .hq = 8, .hkv = 8, .sq = 64, .sk = 66, .d = 64, .dv = 64}}) {
      expect_within_contract(dense_problem(seed++, dtype, sizes));
    }
    RandomProblem problem =
        dense_problem(seed++, dtype, {.b = 2, .hq = 3, .hkv = 3, .sq = 342, .sk = 342, .d = 64, .dv = 8});
    problem.options.softcap = 0.5f;
    problem.options.dropout = {.probability = 0.9f, .seed = seed};
    expect_within_contract(problem);
    problem = plain_problem(seed++);
    problem.options.scale = 0.0f;
    expect_within_contract(problem);
    problem = plain_problem(seed++);
    problem.q = Buffer(problem.dtype, problem.q.shape(), {.expanded = {2}});
    Random rng(seed);
    problem.q.fill_random(rng);
    expect_within_contract(problem);
  }
}

TEST_F(MmaBackward, OfFewKeysIsWithinTheContract) {
  std::uint64_t seed = 360;
  for (const std::int64_t keys : {2, 3, 17, 64}) {
    const Sizes sizes{.b = 2, .hq = 4, .hkv = 2, .sq = 100, .sk = keys, .d = 64, .dv = 64};
    for (const DType dtype : {DType::f16, DType::bf16}) {
      expect_within_contract(dense_problem(seed++, dtype, sizes));
    }
  }
}

// Many results, but few terms in each: of so few queries, or of so few that a mask leaves.
TEST_F(MmaBackward, OfFewQueriesAKeyIsWithinTheContract) {
  for (std::uint64_t seed = 365; seed < 373; ++seed) {
    const bool masked = seed % 4 < 2;
    Sizes sizes{.b = 180, .hq = 4, .hkv = 2, .sq = 4, .sk = 93, .d = 96, .dv = 96};
    if (masked) {
      sizes.b = 20;
      sizes.sq = 40;
    }
    RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16, sizes);
    if (masked) {
      problem.mask = Buffer(DType::f32, {problem.length_q, 1});
      for (std::int64_t i = 0; i < problem.length_q; ++i) {
        problem.mask.set({i, 0}, i % 10 == 3 ? 0.5 : -HUGE_VAL);
      }
    }
    expect_within_contract(problem);
  }
}

// Whole rows under a mask of -65504, whose scores f32 keeps to 1/256: those that rows are anchored at and
// those of pairs must be the same numbers, with ALiBi, too.
TEST_F(MmaBackward, OfRowsFarBelowZeroIsWithinTheContract) {
  for (std::uint64_t seed = 275; seed < 279; ++seed) {
    RandomProblem problem = plain_problem(seed, 128);
    multiply(problem.q, 5);
    problem.mask = Buffer(problem.dtype, {problem.length_q, 1});
    for (std::int64_t i = 0; i < problem.length_q; ++i) problem.mask.set({i, 0}, i % 3 == 0 ? -65504 : 0);
    problem.alibi_slopes = random_buffer(seed, DType::f32, {problem.heads_q}, 0.03);
    problem.asked.own_forward = seed % 2 == 0;
    expect_within_contract(problem);
  }
}

TEST_F(MmaBackward, OfManyQueriesIsWithinTheContract) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    RandomProblem problem =
        dense_problem(260, dtype, {.b = 1, .hq = 2, .hkv = 2, .sq = 2100, .sk = 133, .d = 64, .dv = 64});
    expect_within_contract(problem);
    problem.options.window = {.left = 30, .right = 100};
    expect_within_contract(problem);
  }
}

// Few keys of many queries: several blocks share a tile of keys.
TEST_F(MmaBackward, OfManyHeadsToAKeyHeadIsWithinTheContract) {
  std::uint64_t seed = 265;
  for (const std::int64_t dim : {64, 128, 256}) {
    const Sizes sizes{.b = 1, .hq = 8, .hkv = 1, .sq = 150, .sk = 260, .d = dim, .dv = dim};
    RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16, sizes);
    expect_within_contract(problem);
    problem.options.causal = true;
    multiply(problem.q, 3);
    expect_within_contract(problem);
    problem.options.deterministic = true;
    expect_within_contract(problem);
    problem.asked.dk = false;
    expect_within_contract(problem);
    ++seed;
  }
}

TEST_F(MmaBackward, InOrderIsWithinTheContractWhereAllLookAtTheSameKeys) {
  std::uint64_t seed = 275;
  for (const std::int64_t heads_kv : {1, 8}) {
    for (const std::int64_t dim : {64, 128, 256}) {
      const Sizes sizes{.b = 2, .hq = 8, .hkv = heads_kv, .sq = 100, .sk = 110, .d = dim, .dv = dim};
      RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16, sizes);
      problem.options.deterministic = true;
      problem.options.causal = true;
      // A score of 3 with key 3, of which the others know nothing. A higher one would leave nearly all of a
      // row's weight to that key, which takes strict precision (docs/numerics.md).
      const double part = std::sqrt(3 * std::sqrt(static_cast<double>(dim)));
      for (std::int64_t b = 0; b < sizes.b; ++b) {
        for (std::int64_t h = 0; h < sizes.hq; ++h) {
          for (std::int64_t i = 0; i < sizes.sq; ++i) problem.q.set({b, h, i, 0}, part);
        }
        for (std::int64_t h = 0; h < heads_kv; ++h) {
          for (std::int64_t j = 0; j < sizes.sk; ++j) problem.k.set({b, h, j, 0}, j == 3 ? part : 0);
        }
      }
      expect_within_contract(problem);
      problem.options.window = {.left = 40, .right = 0};
      expect_within_contract(problem);
      ++seed;
    }
  }
}

TEST_F(MmaBackward, GivesEachGradientWithoutTheOthers) {
  for (int without = 0; without < 3; ++without) {
    RandomProblem problem = plain_problem(270 + static_cast<std::uint64_t>(without));
    (without == 0 ? problem.asked.dq : without == 1 ? problem.asked.dk : problem.asked.dv) = false;
    multiply(problem.q, 5);
    expect_within_contract(problem);
  }
}

TEST_F(MmaBackward, IsWithinTheContractWithEachFeature) {
  using Change = void (*)(RandomProblem&);
  const Change changes[] = {
      [](RandomProblem& p) { p.options.softcap = 5; },
      [](RandomProblem& p) { p.alibi_slopes = random_buffer(p.seed, DType::f32, {p.heads_q}, 0.1); },
      [](RandomProblem& p) {
        p.mask = random_buffer(p.seed, DType::boolean, {p.batch, 1, p.length_q, p.length_k});
      },
      [](RandomProblem& p) {
        p.mask = random_buffer(p.seed, p.dtype, {p.heads_q, 1, p.length_k});
        p.asked.dmask = true;
        p.asked.dmask_dtype = p.dtype;
      },
      [](RandomProblem& p) { p.options.dropout = {.probability = 0.3f, .seed = p.seed}; },
      [](RandomProblem& p) {
        p.sinks = random_buffer(p.seed, DType::f32, {p.heads_q}, 2);
        p.asked.dsinks = true;
      },
      [](RandomProblem& p) {
        p.options.window = {.left = 20, .right = 3};
        p.options.dropout = {.probability = 0.6f, .seed = p.seed};
        p.options.softcap = 2;
      },
      [](RandomProblem& p) { p = featured_problem(p.seed, p.dtype, sizes_of(p)); }};
  std::uint64_t seed = 280;
  for (const Change change : changes) {
    for (const std::int64_t dim : {64, 128, 256}) {
      RandomProblem problem = plain_problem(seed++, dim, 2);  // some features need 1024 rows
      if (seed % 3 == 0) multiply(problem.q, 5);
      change(problem);
      expect_within_contract(problem);
    }
  }
}

// Rows that begin anywhere, and head dims that fill no chunk.
TEST_F(MmaBackward, IsWithinTheContractAtOddHeadDims) {
  for (const std::int64_t dim : {31, 100, 129}) {
    expect_within_contract(plain_problem(310 + static_cast<std::uint64_t>(dim), dim));
  }
}

// An lse of which f32 keeps nothing but the mask: padding, as models write it.
TEST_F(MmaBackward, IsWithinTheContractWhereAMaskCoversWholeRows) {
  for (const std::uint64_t seed : {320, 321}) {
    RandomProblem problem = plain_problem(seed);
    problem.mask = random_buffer(seed, problem.dtype, {problem.length_q, 1});
    for (std::int64_t i = 0; i < problem.length_q; i += 3) {
      problem.mask.set({i, 0}, problem.dtype == DType::f16 ? -60000.0 : -1e5);
    }
    expect_within_contract(problem);
  }
}

TEST_F(MmaBackward, GivesTheSameBitsAgainWhereThatIsAsked) {
  const Stream stream;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const std::int64_t batch : {1, 2, 9}) {  // blocks share keys, or need not
      const Sizes sizes{
          .b = batch, .hq = 8, .hkv = batch == 1 ? 1 : 4, .sq = 700, .sk = 900, .d = dim, .dv = dim};
      RandomProblem plain = dense_problem(330, DType::bf16, sizes);
      multiply(plain.q, 4);
      plain.options.causal = true;
      Sizes fewer = sizes;
      fewer.sq = 200;  // masks of all pairs take long to draw
      for (const RandomProblem& problem : {plain, featured_problem(331, DType::f16, fewer)}) {
        const DeviceProblem on_device(problem, "mma");
        const std::vector<std::byte> first = on_device.run(stream);
        for (int run = 0; run < 5; ++run) EXPECT_TRUE(on_device.run(stream) == first) << dim << ' ' << batch;
      }
    }
  }
}

TEST_F(MmaBackward, SaysWhatItDoesNotTake) {
  const auto reason = [](const Sizes& sizes) {
    return reason_against(dense_problem(340, DType::bf16, sizes), "mma", Pass::backward);
  };
  EXPECT_NE(reason({.b = 1, .hq = 1, .hkv = 1, .sq = 200, .sk = 200, .d = 264, .dv = 64}), "");
  RandomProblem problem = plain_problem(341);
  problem.options.precision = Precision::strict;
  EXPECT_NE(reason_against(problem, "mma", Pass::backward).find("strict"), std::string::npos);
  EXPECT_EQ(reason_against(problem, "mma", Pass::forward), "");
  problem = plain_problem(342);
  problem.k = Buffer(problem.dtype, problem.k.shape(), {.expanded = {2}});
  EXPECT_NE(reason_against(problem, "mma", Pass::backward).find("repeat one row"), std::string::npos);
  // Of an only key the gradient of its score is 0.
  problem = plain_problem(343);
  problem.options.causal = true;
  problem.options.window = {.left = 0, .right = {}};
  EXPECT_NE(reason_against(problem, "mma", Pass::backward).find("at least 2 keys"), std::string::npos);
  // With causal from the top left, a single query sees one key, however many there are.
  problem =
      dense_problem(344, DType::bf16, {.b = 8, .hq = 32, .hkv = 32, .sq = 1, .sk = 8, .d = 64, .dv = 64});
  EXPECT_EQ(reason_against(problem, "mma", Pass::backward), "");
  problem.options.causal = true;
  EXPECT_NE(reason_against(problem, "mma", Pass::backward).find("at least 2 keys"), std::string::npos);
  // In few rows the rounding of O does not average out.
  const Sizes few_rows{.b = 1, .hq = 2, .hkv = 1, .sq = 63, .sk = 300, .d = 64, .dv = 64};
  EXPECT_NE(reason(few_rows).find("128 query rows"), std::string::npos);
}

// Problems that mma once took and got wrong: a single key that a query sees, few rows in which one key has
// nearly all the weight, or few rows that dropout, a block mask or lengths leave few keys.
TEST_F(MmaBackward, LeavesFewRowsOfOneKeyToOthers) {
  constexpr std::uint64_t seeds[] = {0x388495061eb06ce1, 0x962b1967c90789ba, 0x7bc42e82782acb92,
                                     0xb19892fd50ff4222, 0x805fc0138b7a2a13, 0xcbbb9c27d23146b3,
                                     0xee979f2730a45df3, 0x9ba3f69655344a1c, 0xbb681d6c5327769f,
                                     0x56befa6cdf4b947d, 0x1ced68e9e663901c};
  // The same of the domain of mma, with gradients of a logit scale among them.
  constexpr std::uint64_t mma_seeds[] = {0x7b2778808e600017, 0x9d0f0a32f70a9b34, 0xefb5c7f98332e5d6,
                                         0x96e5c9afa18fd79d, 0x59deae7735fe3840};
  const auto expect_left = [](const RandomProblem& problem) {
    EXPECT_NE(reason_against(problem, "mma", Pass::backward), "") << to_string(problem);
    EXPECT_EQ(reason_against(problem, "fused", Pass::backward), "") << to_string(problem);
  };
  for (const std::uint64_t seed : seeds) expect_left(random_problem(seed));
  for (const std::uint64_t seed : mma_seeds) expect_left(random_mma_problem(seed));
}

}  // namespace
}  // namespace tilewise::test::mma_backward_test
