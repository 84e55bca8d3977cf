#include <cstdio>

#include "cuda/gemm/sm90/few_rows/few_tile_choice.h"
#include "cuda/layer/device_call.h"
#include "cuda/runtime/device.h"
#include "layer/ffn_case.h"

namespace tilewise::test::ffn_test {
namespace {

using namespace ffn_case;

class CudaFfn : public CudaLayerTest {
 protected:
  /// Whether few_rows is chosen.
  static bool takes_few(const Problem& p) {
    FfnInputs in = p.inputs();
    FfnOutputs out = p.outputs();
    std::vector<Tensor*> tensors = tensors_of(in);
    tensors.push_back(&out.out);
    for (Tensor* tensor : tensors) tensor->device = first_device;
    const Explanation explanation = explain_ffn_forward(in, p.options, out, cuda_context());
    return explanation.entries.front().verdict == Explanation::Verdict::chosen;
  }

  static std::size_t workspace_of(const Problem& p) {
    FfnInputs in = p.inputs();
    FfnOutputs out = p.outputs();
    std::vector<Tensor*> tensors = tensors_of(in);
    tensors.push_back(&out.out);
    for (Tensor* tensor : tensors) tensor->device = first_device;
    return ffn_forward_workspace(in, p.options, out, cuda_context());
  }

  /// A network whose rows begin at multiples of 16 bytes, packed or not.
  static Problem aligned_problem(Random& random, Sizes n, DType dtype, Activation activation, bool gated) {
    Problem p;
    const auto matrix = [&](std::int64_t rows, std::int64_t columns, double deviation) {
      Placement placement;
      placement.padding = Shape{0, (8 - columns % 8) % 8 + 8 * random.between(0, 1)};
      return random_buffer(random, dtype, {rows, columns}, deviation, placement);
    };
    const auto bias = [&](std::int64_t count) {
      return random.chance(0.5) ? random_buffer(random, dtype, {count}, 0.5) : Buffer();
    };
    const double of_embed = 1 / std::sqrt(static_cast<double>(n.embed));
    p.x = matrix(n.tokens, n.embed, 1);
    p.up = matrix(n.hidden, n.embed, of_embed);
    p.up_bias = bias(n.hidden);
    if (gated) {
      p.gate = matrix(n.hidden, n.embed, of_embed);
      p.gate_bias = bias(n.hidden);
    }
    p.down = matrix(n.out, n.hidden, 1 / std::sqrt(static_cast<double>(n.hidden)));
    p.down_bias = bias(n.out);
    if (random.chance(0.5)) p.residual = matrix(n.tokens, n.out, 1);
    p.out = matrix(n.tokens, n.out, 1);
    p.out.poison();
    p.options.activation = activation;
    return p;
  }

  static bool has_few_rows() {
    Random random(1);
    return takes_few(aligned_problem(random, {2, 64, 64, 64}, DType::bf16, Activation::silu, true));
  }
  static int multiprocessors() { return cuda::device_properties(first_device.index).multiprocessors; }
  /// Of the network's products.
  static bool up_by_tiles(const Sizes& n, bool gated) {
    return cuda::gemm::runs_by_tiles({.m = n.tokens, .n = n.hidden, .k = n.embed, .gated = gated},
                                     multiprocessors());
  }
  static bool down_by_tiles(const Sizes& n) {
    return cuda::gemm::runs_by_tiles({.m = n.tokens, .n = n.out, .k = n.hidden}, multiprocessors());
  }
};

TEST_F(CudaFfn, BothPassesAreNearTheTruthForEveryActivationAndType) {
  std::uint64_t seed = 4000;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Activation activation :
         {Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
      for (const bool gated : {false, true}) {
        SeededRandom random(++seed);
        const Sizes n{random.between(1, 150), 8 * random.between(1, 12), 8 * random.between(1, 20),
                      8 * random.between(1, 12)};
        Problem p = random_problem(random, n, dtype, activation, gated);
        check_forward(p, cuda_context());
        check_backward(p, cuda_context());
      }
    }
  }
}

TEST_F(CudaFfn, FewTokensAreNearTheTruth) {
  int taken = 0;
  for (std::uint64_t seed = 4100; seed < 4160; ++seed) {  // rows lie as they want in some of them
    SeededRandom random(seed);
    const Sizes n{random.between(1, 64), 8 * random.between(1, 60), 8 * random.between(1, 60),
                  8 * random.between(1, 60)};
    Problem p = random_problem(random, n, random.pick({DType::f16, DType::bf16}), Activation::silu,
                               random.chance(0.5));
    if (random.chance(0.3)) p.options.max_intermediate_bytes = 5000;
    if (!takes_few(p)) continue;
    p.options.kernel = "few_rows";
    check_forward(p, cuda_context());
    ++taken;
  }
  std::printf("%d of 60 problems were taken\n", taken);
}

TEST_F(CudaFfn, FewTokensWithAProductByTilesAreNearTheTruth) {
  if (!has_few_rows()) GTEST_SKIP() << "no Hopper GPU";
  const std::int64_t wide = 83 * multiprocessors() / 8 * 8, long_sums = 32 * multiprocessors() - 96;
  std::uint64_t seed = 4160;
  for (const std::int64_t tokens : {1, 2, 15, 16, 17, 32, 33, 64, 65}) {
    const bool few = tokens <= 64;
    const std::int64_t less = tokens == 1 ? 0 : 3;  // the only row of an odd length is not aligned
    for (const Sizes& n : {Sizes{tokens, 136 - less, wide, 72 - less},
                           {tokens, 72 - less, 192, long_sums - less},
                           {tokens, 72 - less, 264, 136 - less}}) {
      for (const bool gated : {false, true}) {
        SeededRandom random(++seed);
        Problem p = aligned_problem(
            random, n, seed / 2 % 2 == 0 ? DType::f16 : DType::bf16,
            random.pick({Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu}),
            gated);
        EXPECT_EQ(up_by_tiles(n, gated), few && tokens > 1 && n.hidden == wide);
        EXPECT_EQ(down_by_tiles(n), few && tokens > 1 && n.out == long_sums - less);
        EXPECT_EQ(takes_few(p), few);
        check_forward(p, cuda_context());
      }
    }
  }
}

TEST_F(CudaFfn, FewTokensWithBothProductsByTilesAreNearTheTruth) {
  if (!has_few_rows()) GTEST_SKIP() << "no Hopper GPU";
  const std::int64_t wide = 84 * multiprocessors() / 64 * 64, long_sums = 32 * multiprocessors() - 99;
  std::uint64_t seed = 4240;
  for (const auto& [tokens, gated] : {std::pair{16, true}, {34, false}}) {
    SeededRandom random(++seed);
    const Sizes n{tokens, 197, wide, long_sums};
    Problem p = aligned_problem(random, n, seed % 2 == 0 ? DType::f16 : DType::bf16, Activation::silu, gated);
    EXPECT_TRUE(up_by_tiles(n, gated) && down_by_tiles(n) && takes_few(p));
    check_forward(p, cuda_context());
    const std::vector<std::byte> bits = p.out.bytes();
    p.out.poison();
    forward(p, cuda_context());
    EXPECT_EQ(bits, p.out.bytes());
  }
}

TEST_F(CudaFfn, WithProductsKeptBothPassesAreNearTheTruth) {
  std::uint64_t seed = 4400;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Activation activation :
         {Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
      for (const bool gated : {false, true}) {
        SeededRandom random(++seed);
        const Sizes n{random.between(1, 150), 8 * random.between(1, 12), 8 * random.between(1, 20),
                      8 * random.between(1, 12)};
        Problem p = random_problem(random, n, dtype, activation, gated);
        if (random.chance(0.3)) p.options.max_intermediate_bytes = 20000;
        check_kept(p, random, cuda_context());
      }
    }
  }
}

TEST_F(CudaFfn, ABoundOnMemoryChangesNothing) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    SeededRandom random(4200);
    Problem p = random_problem(random, {150, 64, 200, 64}, dtype, Activation::silu, true);
    p.options.max_intermediate_bytes = 20000;
    check_forward(p, cuda_context());
    check_backward(p, cuda_context());
  }
}

// Products of f32 on Hopper keep split copies of their weights.
TEST_F(CudaFfn, ABoundOnMemoryCutsSplitWeights) {
  if (!has_few_rows()) GTEST_SKIP() << "no Hopper GPU";
  std::uint64_t seed = 4250;
  for (const bool gated : {false, true}) {
    for (const std::int64_t hidden : {1024, 1100}) {  // pieces that are all alike, and a rest
      SeededRandom random(++seed);
      const std::int64_t tokens = 136;
      Problem p = aligned_problem(random, {tokens, 64, hidden, 640}, DType::f32, Activation::silu, gated);
      const std::size_t unbounded = workspace_of(p);
      const auto h_bytes = static_cast<std::size_t>(tokens * hidden * 4);
      p.options.max_intermediate_bytes = 3 * h_bytes;
      const std::size_t bounded = workspace_of(p);
      EXPECT_LT(bounded, unbounded);
      EXPECT_LE(bounded, h_bytes + p.options.max_intermediate_bytes + 256);
      check_forward(p, cuda_context());
    }
  }
}

TEST_F(CudaFfn, NoTokensAreValid) {
  SeededRandom random(4300);
  Problem p = random_problem(random, {0, 16, 32, 16}, DType::bf16, Activation::gelu, false);
  check_forward(p, cuda_context());
  check_backward(p, cuda_context());
}

}  // namespace
}  // namespace tilewise::test::ffn_test
