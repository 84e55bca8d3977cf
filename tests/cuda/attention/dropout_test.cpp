#include <gtest/gtest.h>

#include <string>
#include <type_traits>
#include <vector>

#include "attention/dropout.h"
#include "cuda/attention/device_problem.h"
#include "support/buffer.h"

namespace tilewise::test::dropout_test {
namespace {

constexpr std::int64_t batch = 2, heads = 3, length = 133, dim = 8;

using Pattern = std::vector<bool>;  // [batch, heads, queries, keys]: which weights are kept

Pattern contract(const Dropout& dropout) {
  const DropoutMask mask(dropout);
  Pattern kept;
  for (std::uint32_t head = 0; head < batch * heads; ++head) {
    for (std::uint32_t i = 0; i < length; ++i) {
      for (std::uint32_t j = 0; j < length; ++j) kept.push_back(mask.keeps(head, i, j));
    }
  }
  return kept;
}

void set_to_identity(Buffer& buffer) {  // [batch, heads, length, length]
  buffer.fill(0);
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t s = 0; s < length; ++s) buffer.set({b, h, s, s}, 1);
    }
  }
}

// Equal scores, so that every weight is positive; key j's value is the j-th unit vector, so that o is the
// matrix of weights; and query i's d_o is the i-th, so that dv is its transpose.
// The seed is among the options, or in memory.
enum class SeedFrom : std::uint8_t { options, memory };
RandomProblem visible_weights(DType dtype, const Dropout& dropout, SeedFrom seed = SeedFrom::options) {
  const Sizes sizes{
      .b = batch, .hq = heads, .hkv = heads, .sq = length, .sk = length, .d = dim, .dv = length};
  RandomProblem p = dense_problem(30, dtype, sizes);
  p.q.fill(0);
  set_to_identity(p.v);
  set_to_identity(p.d_o);
  p.options.dropout = dropout;
  if (seed == SeedFrom::memory) {
    p.dropout_seed = seed_words(dropout);
    p.options.dropout.seed = ~dropout.seed;  // not looked at
  }
  p.asked = {};
  return p;
}

Pattern pattern_of(const Buffer& matrix, bool transposed) {
  Pattern kept;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < length; ++i) {
        for (std::int64_t j = 0; j < length; ++j) {
          kept.push_back((transposed ? matrix.at(b, h, j, i) : matrix.at(b, h, i, j)) != 0);
        }
      }
    }
  }
  return kept;
}

struct Patterns {
  Pattern forward, backward;
};

template <typename Forward, typename Backward>
Patterns patterns_of(const RandomProblem& problem, const std::string& kernel, const Forward& run_forward_on,
                     const Backward& run_backward_on) {
  AttentionOptions options = problem.options;
  options.kernel = kernel;
  const OutputBuffers outputs = make_outputs(problem);
  const GradientBuffers gradients = make_gradients(problem);
  run_forward_on(problem.inputs(), options, outputs.view(), Context{});
  if constexpr (std::is_null_pointer_v<Backward>) {
    return {pattern_of(outputs.o, false), {}};
  } else {
    run_backward_on(problem.inputs(), options, backward_arguments(problem, outputs, gradients), Context{});
    return {pattern_of(outputs.o, false), pattern_of(gradients.dv, true)};
  }
}

class DropoutOnCuda : public CudaKernelTest {};

TEST_P(DropoutOnCuda, IsTheCpusBitForBit) {
  std::vector<DType> taken;
  std::string reason;
  for (const DType dtype : types) {
    const std::string against = reason_against(visible_weights(dtype, {.probability = 0.5f}), GetParam());
    if (against.empty()) taken.push_back(dtype);
    reason = against.empty() ? reason : against;
  }
  if (taken.empty()) GTEST_SKIP() << reason;
  for (const Dropout& dropout : {Dropout{.probability = 0.1f, .seed = 7},
                                 Dropout{.probability = 0.5f, .seed = 0xDEADBEEF12345678u, .offset = 9},
                                 Dropout{.probability = 0.9f, .seed = 1, .offset = 0xFEDCBA9876543210u}}) {
    SCOPED_TRACE("seed " + std::to_string(dropout.seed));
    const Pattern expected = contract(dropout);
    for (const DType dtype : taken) {
      for (const SeedFrom seed : {SeedFrom::options, SeedFrom::memory}) {
        SCOPED_TRACE(std::string(to_string(dtype)) + (seed == SeedFrom::memory ? ", seed in memory" : ""));
        const RandomProblem problem = visible_weights(dtype, dropout, seed);
        const bool both = reason_against(problem, GetParam(), Pass::backward).empty();
        const Patterns cuda =
            both ? patterns_of(problem, GetParam(), run_forward_on_cuda, run_backward_on_cuda)
                 : patterns_of(problem, GetParam(), run_forward_on_cuda, nullptr);
        EXPECT_TRUE(cuda.forward == expected) << "forward";
        const Patterns cpu = patterns_of(problem, "simd", run_forward, run_backward);
        EXPECT_TRUE(cuda.forward == cpu.forward) << "forward, against the CPU";
        if (!both) continue;
        EXPECT_TRUE(cuda.backward == expected) << "backward";
        EXPECT_TRUE(cuda.backward == cpu.backward) << "backward, against the CPU";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, DropoutOnCuda, testing::ValuesIn(cuda_kernels()), kernel_name);

// The measure itself, which needs no device.
TEST(DropoutPatterns, ShowTheContractOnTheCpu) {
  const Dropout dropout{.probability = 0.5f, .seed = 3, .offset = 4};
  const Pattern expected = contract(dropout);
  const auto kept = std::count(expected.begin(), expected.end(), true);
  EXPECT_NEAR(static_cast<double>(kept) / static_cast<double>(expected.size()), 0.5, 0.01);
  for (const char* kernel : {"simd", "reference"}) {
    const Patterns cpu = patterns_of(visible_weights(DType::f32, dropout), kernel, run_forward, run_backward);
    EXPECT_TRUE(cpu.forward == expected) << kernel;
    EXPECT_TRUE(cpu.backward == expected) << kernel;
  }
}

}  // namespace
}  // namespace tilewise::test::dropout_test
