#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test::mma_f32_test {
namespace {

// f32 on tensor cores, where a number is two of f16. Random problems are seldom large enough for it. Here
// each of its head dims has its turn, with what its exactness hangs on: numbers of any size, rows and tiles
// that mix sizes, sums of one sign, weights near 1.

constexpr Sizes usual{.b = 2, .hq = 4, .hkv = 2, .sq = 150, .sk = 203, .d = 64, .dv = 64};

class MmaF32 : public CudaKernelFixture<80> {
 protected:
  template <typename Change>
  static void change(Buffer& buffer, const Change& factor_of) {
    std::vector<double> values = buffer.values();
    for (std::size_t n = 0; n < values.size(); ++n) values[n] *= factor_of(n);
    buffer.set_values(values);
  }

  /// mma, and on Hopper wgmma, which splits numbers in the same way, for head dims to 128.
  static std::vector<const char*> kernels_for(const RandomProblem& problem) {
    static const bool hopper = reason_against(dense_problem(1, DType::f32, usual), "wgmma").empty();
    if (hopper && std::max(problem.q.shape().back(), problem.v.shape().back()) <= 128)
      return {"mma", "wgmma"};
    return {"mma"};
  }

  static void expect_within_contract(const RandomProblem& problem) {
    expect_within_contract(problem, kernels_for(problem));
  }
  static void expect_within_contract(const RandomProblem& problem, const std::vector<const char*>& kernels) {
    SCOPED_TRACE(to_string(problem));
    const Checker checker(problem, all_cores());
    for (const char* kernel : kernels) {
      SCOPED_TRACE(kernel);
      ASSERT_EQ(reason_against(problem, kernel), "");
      const Subject subject{.kernel = kernel,
                            .device = first_device,
                            .forward = run_forward_on_cuda,
                            .backward = run_backward_on_cuda};
      for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
    }
  }

  static std::vector<double> forward(const RandomProblem& problem, const char* kernel,
                                     Precision precision = Precision::standard) {
    const OutputBuffers outputs = make_outputs(problem);
    AttentionOptions options = problem.options;
    options.kernel = kernel;
    options.precision = precision;
    run_forward_on_cuda(problem.inputs(), options, outputs.view(), Context{});
    return outputs.o.values();
  }
};

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double squares = 0;
  double size = 0;
  for (std::size_t n = 0; n < a.size(); ++n) {
    squares += (a[n] - b[n]) * (a[n] - b[n]);
    size += b[n] * b[n];
  }
  return std::sqrt(squares / size);
}

TEST_F(MmaF32, IsWithinTheContractAtEveryHeadDim) {
  std::uint64_t seed = 300;
  for (const std::int64_t dim : {32, 40, 64, 72, 128, 136, 256}) {
    Sizes sizes = usual;
    sizes.d = dim;
    sizes.dv = seed % 2 == 0 ? dim : 64;
    RandomProblem problem = dense_problem(seed, DType::f32, sizes);
    problem.options.causal = seed % 3 != 0;
    problem.options.alignment = seed % 2 == 0 ? Alignment::top_left : Alignment::bottom_right;
    expect_within_contract(problem);
    ++seed;
  }
}

TEST_F(MmaF32, OfManyTilesIsWithinTheContract) {
  for (const std::int64_t dim : {64, 128}) {
    expect_within_contract(dense_problem(
        310, DType::f32, {.b = 1, .hq = 100, .hkv = 4, .sq = 130, .sk = 80, .d = dim, .dv = dim}));
  }
}

// So many blocks of keys that each has the queries that see them for itself; few share them (shares_of).
TEST_F(MmaF32, OfManyHeadsIsWithinTheContract) {
  expect_within_contract(
      dense_problem(312, DType::f32, {.b = 3, .hq = 44, .hkv = 44, .sq = 128, .sk = 136, .d = 40, .dv = 40}));
}

TEST_F(MmaF32, OfAWindowIsWithinTheContract) {
  RandomProblem problem = dense_problem(320, DType::f32, usual);
  problem.options.window = {.left = 50, .right = 40};
  expect_within_contract(problem);
  problem.options.alignment = Alignment::bottom_right;
  expect_within_contract(problem);
}

// Scores that hardly differ, usual ones, and a softmax that saturates.
TEST_F(MmaF32, IsWithinTheContractWhateverTheSoftmaxIsLike) {
  std::uint64_t seed = 330;
  for (const double deviation : {0.03, 5.0, 30.0, 100.0}) {
    RandomProblem problem = dense_problem(seed++, DType::f32, usual);
    change(problem.q, [&](std::size_t) { return deviation; });
    expect_within_contract(problem);
  }
}

TEST_F(MmaF32, OfLongSumsOfOneSignIsWithinTheContract) {
  RandomProblem problem =
      dense_problem(340, DType::f32, {.b = 1, .hq = 1, .hkv = 1, .sq = 64, .sk = 2100, .d = 128, .dv = 64});
  for (Buffer* buffer : {&problem.q, &problem.k, &problem.v}) {
    std::vector<double> values = buffer->values();
    for (double& value : values) value = std::abs(value);
    buffer->set_values(values);
  }
  expect_within_contract(problem);
}

TEST_F(MmaF32, TakesNumbersOfAnySize) {
  std::uint64_t seed = 350;
  for (const double size : {1e30, 1e-30, 1e-36}) {
    RandomProblem problem = dense_problem(seed++, DType::f32, usual);
    change(problem.q, [&](std::size_t) { return size; });
    change(problem.k, [&](std::size_t) { return 1 / size; });
    change(problem.v, [&](std::size_t) { return 1e3 / std::sqrt(size); });
    change(problem.d_o, [&](std::size_t) { return 1e-3 * std::sqrt(size); });
    expect_within_contract(problem);
  }
}

// Channels of q that are as much larger as those of k are smaller. Past some size the parts cannot hold that,
// and such heads are left to the fused kernel.
TEST_F(MmaF32, TakesRowsThatMixSizes) {
  std::uint64_t seed = 360;
  for (const double size : {1e2, 1e4, 1e8, 1e12}) {
    RandomProblem problem = dense_problem(seed++, DType::f32, usual);
    const auto factor = [&](std::size_t n) { return n % 64 % 3 == 0 ? size : 1.0; };
    change(problem.q, factor);
    change(problem.k, [&](std::size_t n) { return 1 / factor(n); });
    expect_within_contract(problem);
  }
}

// Numbers that next to nothing hangs on, too small beside the largest of their tile for the parts to hold.
// One to three of them in a tile leave it fit: then it is not fused that computed the result.
TEST_F(MmaF32, TakesTilesWithSomeSmallNumbers) {
  std::uint64_t seed = 370;
  for (const std::size_t count : {1u, 2u, 3u, 4u, 40u}) {
    RandomProblem problem = dense_problem(seed++, DType::f32, usual);
    for (Buffer* buffer : {&problem.q, &problem.k, &problem.v, &problem.d_o}) {
      constexpr std::size_t two_tiles = 64 * 64;  // 32 rows of 64 dims each; those of the first have them
      const auto head = static_cast<std::size_t>(buffer->extent(2) * buffer->extent(3));
      change(*buffer, [&](std::size_t n) {
        const std::size_t place = n % head % two_tiles;
        return place % 50 == 0 && place / 50 < count ? 1e-12 : 1.0;
      });
    }
    expect_within_contract(problem);
    if (count > 3) continue;
    for (const char* kernel : kernels_for(problem)) {
      EXPECT_NE(forward(problem, kernel), forward(problem, "fused"))
          << kernel << ", " << count << " of a tile";
    }
  }
}

// Queries mind a key in 32 alone, whose value is 0 but for one number, far smaller than those of other keys:
// all of o hangs on numbers of which a tile has one.
TEST_F(MmaF32, TakesRowsThatAreOneSmallNumber) {
  RandomProblem problem = dense_problem(375, DType::f32, usual);
  const auto set = [](Buffer& buffer, const auto& value_of) {
    std::vector<double> values = buffer.values();
    for (std::size_t n = 0; n < values.size(); ++n) values[n] = value_of(n, values[n]);
    buffer.set_values(values);
  };
  const auto minded = [](std::size_t n) { return n / 64 % 203 % 32 == 5; };
  set(problem.q, [](std::size_t n, double x) { return n % 64 == 0 ? 8.0 : x; });
  set(problem.k, [&](std::size_t n, double x) { return n % 64 != 0 ? x : minded(n) ? 0.0 : -60.0; });
  set(problem.v, [&](std::size_t n, double x) {
    if (!minded(n)) return x;
    return n % 64 == n / 64 % 64 ? 1e-9 * x : 0.0;
  });
  expect_within_contract(problem);
}

// One part is as exact as TF32, and that is what the option buys speed with.
TEST_F(MmaF32, IsAsExactAsTf32WhereThatIsAllowed) {
  std::uint64_t seed = 380;
  for (const std::int64_t dim : {64, 128, 256}) {
    Sizes sizes = usual;
    sizes.d = sizes.dv = dim;
    RandomProblem problem = dense_problem(seed++, DType::f32, sizes);
    const std::vector<double> full = forward(problem, "mma");
    problem.options.precision = Precision::allow_tf32;
    for (const char* kernel : kernels_for(problem)) {
      ASSERT_EQ(reason_against(problem, kernel), "");
      const std::vector<double> allowed = forward(problem, kernel, Precision::allow_tf32);
      EXPECT_LT(distance(allowed, full), 1.0 / 2048) << kernel;  // half a unit of TF32
      EXPECT_GT(distance(allowed, full), 1e-5) << kernel;
    }
  }
}

// The largest values are those of keys that no query minds: what is left for the others' weights is their
// difference in size.
TEST_F(MmaF32, IsAsExactAsTf32WhateverTilesOfValuesAreLike) {
  std::uint64_t seed = 385;
  for (const double size : {0.0, 1e2, 1e4, 1e6, 1e9}) {
    RandomProblem problem = dense_problem(seed++, DType::f32, usual);
    const auto set = [](Buffer& buffer, const auto& value_of) {
      std::vector<double> values = buffer.values();
      for (std::size_t n = 0; n < values.size(); ++n) values[n] = value_of(n, values[n]);
      buffer.set_values(values);
    };
    const auto unminded = [](std::size_t n) { return n / 64 % 203 < 64; };
    set(problem.q, [](std::size_t n, double x) { return n % 64 == 0 ? 8.0 : x; });
    set(problem.k, [&](std::size_t n, double x) { return n % 64 == 0 ? (unminded(n) ? -60.0 : 0.0) : x; });
    set(problem.v, [&](std::size_t n, double x) { return (unminded(n) ? size : 1.0) * 1e-4 * x; });
    const std::vector<double> full = forward(problem, "fused");
    problem.options.precision = Precision::allow_tf32;
    for (const char* kernel : kernels_for(problem)) {
      ASSERT_EQ(reason_against(problem, kernel), "");
      const std::vector<double> allowed = forward(problem, kernel, Precision::allow_tf32);
      EXPECT_LT(distance(allowed, full), 1.0 / 2048) << kernel << ", values of " << size;
    }
  }
}

TEST_F(MmaF32, RandomProblemsAreWithinTheContract) {
  constexpr int problems = 40;
  int taken = 0;
  for (std::uint64_t seed = 390; seed < 390 + problems; ++seed) {
    const RandomProblem problem = random_wgmma_problem(seed, true);
    if (!reason_against(problem, "mma").empty()) continue;
    expect_within_contract(problem);
    ++taken;
  }
  EXPECT_GE(taken, problems / 8);  // of most, pairs are too few
}

TEST_F(MmaF32, ProblemsOfItsDomainAreWithinTheContract) {
  constexpr int problems = 20;
  int backward = 0;
  for (std::uint64_t seed = 450; seed < 450 + problems; ++seed) {
    const RandomProblem problem = random_mma_f32_problem(seed);
    if (!reason_against(problem, "mma").empty()) continue;
    if (reason_against(problem, "mma", Pass::backward).empty()) ++backward;
    expect_within_contract(problem, {"mma"});
  }
  EXPECT_GE(backward, problems / 3);
}

TEST_F(MmaF32, SaysWhatItDoesNotTake) {
  Sizes sizes = usual;
  sizes.sk = 64;
  EXPECT_NE(reason_against(dense_problem(1, DType::f32, sizes), "mma").find("keys"), std::string::npos);
  sizes = usual;
  sizes.sq = 31;
  EXPECT_NE(reason_against(dense_problem(1, DType::f32, sizes), "mma").find("queries"), std::string::npos);
  sizes = usual;
  sizes.d = 31;
  EXPECT_NE(reason_against(dense_problem(1, DType::f32, sizes), "mma").find("head dims"), std::string::npos);
  RandomProblem problem = dense_problem(1, DType::f32, usual);
  problem.options.window = {.left = 20, .right = 20};
  EXPECT_NE(reason_against(problem, "mma").find("keys"), std::string::npos);
  EXPECT_NE(reason_against(featured_problem(1, DType::f32, usual), "mma").find("feature"), std::string::npos);
  problem = dense_problem(1, DType::f32, usual);
  problem.v = Buffer(DType::f32, problem.v.shape(), {.expanded = {2}});
  EXPECT_NE(reason_against(problem, "mma").find("values that repeat one row"), std::string::npos);
}

}  // namespace
}  // namespace tilewise::test::mma_f32_test
