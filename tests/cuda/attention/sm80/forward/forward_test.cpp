#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/attention/device_problem.h"
#include "property/check.h"

namespace tilewise::test::mma_test {
namespace {

// Random problems seldom have what the plain kernels of `mma` are for: many results, aligned rows, and
// nothing but a band that hides. Here each head dim they are compiled for has its turn, with tiles that fill
// the GPU and with few, and rows of several heads in one tile.

class MmaForward : public CudaKernelFixture<80> {
 protected:
  static void expect_within_contract(const RandomProblem& problem) {
    SCOPED_TRACE(to_string(problem));
    const Checker checker(problem, all_cores());
    const Subject subject{.kernel = "mma",
                          .device = first_device,
                          .forward = run_forward_on_cuda,
                          .backward = run_backward_on_cuda};
    for (const std::string& failure : checker.check(subject)) ADD_FAILURE() << failure;
  }
};

TEST_F(MmaForward, OfManyTilesIsWithinTheContractAtEveryHeadDim) {
  std::uint64_t seed = 60;
  for (const std::int64_t dim : {40, 64, 72, 96, 128, 136, 192, 200, 256}) {
    const Sizes sizes{.b = 1, .hq = 100, .hkv = 4, .sq = 130, .sk = dim > 128 ? 40 : 80, .d = dim, .dv = dim};
    RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::bf16 : DType::f16, sizes);
    problem.options.causal = seed % 3 != 0;
    problem.options.alignment = Alignment::bottom_right;
    expect_within_contract(problem);
    ++seed;
  }
}

TEST_F(MmaForward, OfFewTilesIsWithinTheContract) {
  std::uint64_t seed = 80;
  for (const std::int64_t dim : {64, 96, 128, 192, 256}) {
    const Sizes sizes{.b = 2, .hq = 2, .hkv = 1, .sq = 77, .sk = 257, .d = dim, .dv = dim == 128 ? 64 : dim};
    RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::f16 : DType::bf16, sizes);
    problem.options.window = {.left = 50, .right = 7};
    problem.options.alignment = seed % 2 == 0 ? Alignment::top_left : Alignment::bottom_right;
    expect_within_contract(problem);
    ++seed;
  }
}

TEST_F(MmaForward, OfManyTilesInOneRowOfKeysIsWithinTheContract) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    RandomProblem problem =
        dense_problem(90, dtype, {.b = 1, .hq = 2, .hkv = 1, .sq = 133, .sk = 2100, .d = 64, .dv = 64});
    expect_within_contract(problem);
    problem.q.fill(0.5);  // equal scores
    expect_within_contract(problem);
  }
}

TEST_F(MmaForward, OfAFewQueriesOfManyHeadsIsWithinTheContract) {
  std::uint64_t seed = 100;
  for (const std::int64_t queries : {1, 3, 16, 33}) {
    for (const std::int64_t group : {3, 8, 16}) {
      const Sizes sizes{.b = 2, .hq = 3 * group, .hkv = 3, .sq = queries, .sk = 200, .d = 128, .dv = 128};
      RandomProblem problem = dense_problem(seed, seed % 2 == 0 ? DType::f16 : DType::bf16, sizes);
      problem.options.causal = true;
      problem.options.alignment = Alignment::bottom_right;
      expect_within_contract(problem);
      expect_within_contract(featured_problem(seed, problem.dtype, sizes));
      ++seed;
    }
  }
}

// So few blocks that several share a tile of queries, each with a part of the keys; with lengths some parts
// are empty, and so may be all.
TEST_F(MmaForward, InPartsOfKeysIsWithinTheContract) {
  std::uint64_t seed = 110;
  for (const std::int64_t queries : {1, 40}) {
    for (const std::int64_t dim : {64, 128, 200}) {
      const Sizes sizes{.b = 3, .hq = 12, .hkv = 4, .sq = queries, .sk = 900, .d = dim, .dv = dim - 8};
      const DType dtype = seed % 2 == 0 ? DType::f16 : DType::bf16;
      RandomProblem problem =
          seed % 4 < 2 ? dense_problem(seed, dtype, sizes) : featured_problem(seed, dtype, sizes);
      problem.asked.backward = false;
      expect_within_contract(problem);
      problem.key_lengths = Buffer(DType::i32, {3});
      problem.key_lengths.set_values(std::vector<double>{0, 17, 900});
      expect_within_contract(problem);
      ++seed;
    }
  }
}

// Elements of a mask are loaded four at a time where they lie so, and one at a time at the end and where not:
// in rows of odd lengths, of a view that begins anywhere, turned, and where a window begins between fours.
TEST_F(MmaForward, IsWithinTheContractWithMasksHoweverTheyLie) {
  std::uint64_t seed = 140;
  for (const std::int64_t dim : {64, 128, 200}) {
    for (const std::int64_t keys : {256, 203}) {
      const Sizes sizes{.b = 2, .hq = 4, .hkv = 2, .sq = 150, .sk = keys, .d = dim, .dv = dim};
      for (const DType kind : {DType::boolean, DType::f32, DType::bf16}) {
        const DType dtype = kind == DType::f32 ? DType::f16 : DType::bf16;
        for (const Shape& shape : {Shape{sizes.sq, keys}, Shape{2, 1, 1, keys}, Shape{4, sizes.sq, 1}}) {
          RandomProblem problem = dense_problem(seed, dtype, sizes);
          Random rng(seed++);
          problem.mask = Buffer(kind, shape);
          problem.mask.fill_random(rng);
          problem.options.causal = seed % 3 == 0;
          if (seed % 5 == 0) problem.options.window = {.left = 70, .right = 30};
          if (seed % 4 == 0) problem.options.dropout = {.probability = 0.3f, .seed = seed};
          problem.asked = {};
          expect_within_contract(problem);
        }
      }
    }
  }
}

// Scores that hardly differ: all rows of o are nearly the same few elements.
TEST_F(MmaForward, OfRowsNearlyAlikeIsWithinTheContract) {
  for (std::uint64_t seed = 130; seed < 142; ++seed) {
    const std::int64_t dim = seed % 3 == 0 ? 64 : 56;
    RandomProblem problem = dense_problem(seed, seed % 4 == 0 ? DType::bf16 : DType::f16,
                                          {.b = 1,
                                           .hq = 2,
                                           .hkv = 1,
                                           .sq = 147 * (1 + static_cast<std::int64_t>(seed % 2)),
                                           .sk = 294,
                                           .d = dim,
                                           .dv = dim});
    std::vector<double> values = problem.q.values();
    for (double& value : values) value *= 0.1;
    problem.q.set_values(values);
    problem.alibi_slopes = Buffer(DType::f32, {2});
    problem.alibi_slopes.set({0}, 0.01);
    problem.alibi_slopes.set({1}, 0.02);
    problem.asked.backward = false;
    expect_within_contract(problem);
  }
}

// Weights that sum to 1 leave equal values as they are, whatever their own roundings.
TEST_F(MmaForward, LeavesEqualValuesAsTheyAre) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    RandomProblem problem =
        dense_problem(120, dtype, {.b = 2, .hq = 16, .hkv = 4, .sq = 70, .sk = 300, .d = 64, .dv = 64});
    problem.v.fill(0.7109375);
    const OutputBuffers outputs = make_outputs(problem);
    AttentionOptions options = problem.options;
    options.kernel = "mma";
    run_forward_on_cuda(problem.inputs(), options, outputs.view(), Context{});
    for (const double value : outputs.o.values()) ASSERT_EQ(value, 0.7109375) << to_string(dtype);
  }
}

}  // namespace
}  // namespace tilewise::test::mma_test
