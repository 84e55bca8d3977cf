#include <algorithm>

#include "cuda/layer/device_call.h"
#include "cuda/runtime/device.h"
#include "layer/norm_case.h"

// Backward of long rows that come by bulk copies, and where it begins and ends.

namespace tilewise::test::norm_test {
namespace {

using namespace norm_case;

class CudaNormRing : public CudaLayerTest {
 protected:
  void SetUp() override {
    CudaLayerTest::SetUp();
    if (IsSkipped()) return;
    if (cuda::device_properties(first_device.index).compute_capability < 90) {
      GTEST_SKIP() << "the ring needs compute capability 9.0";
    }
  }

  static Explanation explain(const Problem& p) {
    NormInputs in = p.backward_inputs();
    NormGradients g = p.gradients();
    Explanation explanation;
    call_on(
        cuda_context(),
        {&in.x, &in.weight, &in.bias, &g.dy, &g.d_sum, &g.rstd, &g.mean, &g.dx, &g.d_weight, &g.d_bias},
        [](const Context&) { return std::size_t{0}; },
        [&](const Context& c) { explanation = explain_norm_backward(in, p.options, g, c); });
    return explanation;
  }
  static std::string chosen(const Problem& p) {
    for (const Explanation::Entry& entry : explain(p).entries) {
      if (entry.verdict == Explanation::Verdict::chosen) return entry.kernel;
    }
    return "none";
  }
};

/// Rows with gaps or without, all of which begin at multiples of 16 bytes.
Placement aligned_placement(Random& random) {
  Placement placement;
  if (random.chance(0.5)) placement.padding = {0, 8 * random.between(1, 9)};
  placement.lead = random.chance(0.5) ? 8 * random.between(1, 5) : 0;
  return placement;
}

/// Of what may be there: a weight in the type of x or in f32, a bias, what comes to the sum.
Problem random_aligned(Random& random, std::int64_t rows, std::int64_t dim, DType dtype, Norm norm) {
  Problem p;
  const Shape shape = {rows, dim};
  p.options.norm = norm;
  p.x = random_buffer(random, dtype, shape, random.log_uniform(0.1, 10), aligned_placement(random));
  p.y = Buffer(dtype, shape);
  p.rstd = Buffer(DType::f32, {rows});
  if (norm == Norm::layer) p.mean = Buffer(DType::f32, {rows});
  p.dy = random_buffer(random, dtype, shape, 1, aligned_placement(random));
  if (random.chance(0.5)) p.d_sum = random_buffer(random, dtype, shape, 1, aligned_placement(random));
  p.dx = Buffer(dtype, shape, aligned_placement(random));
  const DType weights = random.chance(0.3) ? DType::f32 : dtype;
  Placement anywhere;  // weights are read once, element by element
  anywhere.lead = random.chance(0.5) ? random.between(1, 5) : 0;
  if (random.chance(0.8)) {
    p.weight = random_buffer(random, weights, {dim}, 1, anywhere);
    p.d_weight = Buffer(weights, {dim});
  }
  if (norm == Norm::layer && random.chance(0.7)) {
    p.bias = random_buffer(random, weights, {dim});
    p.d_bias = Buffer(weights, {dim});
  }
  return p;
}

/// What backward by a kernel leaves: dx, and the gradients of weight and bias where there are some.
struct Results {
  std::vector<std::byte> dx, d_weight, d_bias;
  bool operator==(const Results&) const = default;
};
Results results_of(Problem& p, std::string_view kernel, const Context& context) {
  p.options.kernel = kernel;
  for (Buffer* buffer : {&p.dx, &p.d_weight, &p.d_bias}) {
    if (buffer->given()) buffer->poison();
  }
  backward(p, context);
  EXPECT_TRUE(p.dx.guards_intact() && p.dx.all_written());
  const auto bytes = [](const Buffer& b) { return b.given() ? b.bytes() : std::vector<std::byte>{}; };
  return {bytes(p.dx), bytes(p.d_weight), bytes(p.d_bias)};
}

constexpr DType types[] = {DType::f16, DType::bf16};
constexpr Norm norms[] = {Norm::rms, Norm::layer};

TEST_F(CudaNormRing, GradientsOfEveryLengthAreNearTheTruth) {
  std::uint64_t seed = 2500;
  for (const std::int64_t dim : {1024, 1536, 2560, 3584, 4096, 4608, 5120, 7168, 8192}) {
    for (const DType dtype : types) {
      for (const Norm norm : norms) {
        SeededRandom random(++seed);
        const std::int64_t rows = random.chance(0.3) ? 1 : random.between(2, 9);
        Problem p = random_aligned(random, rows, dim, dtype, norm);
        const Problem e = exact_problem(p);
        const PlainNorm plain(p);
        forward(e);
        backward(e);
        forward(p, cuda_context());
        results_of(p, "ring", cuda_context());
        expect_near(p.dx, e.dx.values(), plain.dx, "dx", 2);
        const double terms = 4 * std::sqrt(static_cast<double>(rows));
        if (p.d_weight.given())
          expect_near(p.d_weight, e.d_weight.values(), plain.d_weight, "d_weight", terms);
        if (p.d_bias.given()) expect_near(p.d_bias, e.d_bias.values(), plain.d_bias, "d_bias", terms);
      }
    }
  }
}

// Either kernel has the same blocks and passes, so the same bits; and again, in another run.
TEST_F(CudaNormRing, ResultsAreThoseOfRowsTakenByThreads) {
  const int multiprocessors = cuda::device_properties(first_device.index).multiprocessors;
  std::uint64_t seed = 2600;
  for (const std::int64_t dim : {1024, 2048, 4096, 5120, 8192}) {
    const std::int64_t blocks = multiprocessors * std::max<std::int64_t>(1, 8192 / dim);
    // One, fewer than blocks, and more, so that some blocks have one more than others.
    for (const std::int64_t rows : {std::int64_t{1}, blocks - 1, 2 * blocks + 3}) {
      for (const Norm norm : norms) {
        SeededRandom random(++seed);
        Problem p = random_aligned(random, rows, dim, types[seed % 2], norm);
        if (p.weight.given()) {  // those that are not aligned rows takes one by one, in another order
          p.weight = random_buffer(random, p.weight.dtype(), {dim});
        }
        forward(p, cuda_context());
        const Results ring = results_of(p, "ring", cuda_context());
        EXPECT_TRUE(ring == results_of(p, "ring", cuda_context()));
        EXPECT_TRUE(ring == results_of(p, "rows", cuda_context())) << rows << " x " << dim;
      }
    }
  }
}

// Statistics of rows are in shared memory, of 128 of a block's at a time.
TEST_F(CudaNormRing, BlocksMayHaveMoreRowsThanStatisticsAtHand) {
  constexpr std::int64_t dim = 4608;  // the shortest rows of which a multiprocessor has one block
  constexpr std::int64_t few = 101;   // over and over
  const std::int64_t rows =
      cuda::device_properties(first_device.index).multiprocessors * 129 / few * few + few;
  for (const Norm norm : norms) {
    SeededRandom random(2700);
    Problem p;
    p.options.norm = norm;
    for (Buffer* buffer : {&p.x, &p.dy}) {
      *buffer = Buffer(DType::bf16, {rows, dim});
      const std::vector<std::byte> bytes = random_buffer(random, DType::bf16, {few, dim}).bytes();
      auto* to = static_cast<std::byte*>(buffer->view().data);
      for (std::int64_t row = 0; row < rows; row += few) to = std::copy(bytes.begin(), bytes.end(), to);
    }
    p.y = p.dx = Buffer(DType::bf16, {rows, dim});
    p.weight = random_buffer(random, DType::bf16, {dim});
    p.d_weight = Buffer(DType::bf16, {dim});
    p.rstd = Buffer(DType::f32, {rows});
    if (norm == Norm::layer) p.mean = Buffer(DType::f32, {rows});
    forward(p, cuda_context());
    const Results ring = results_of(p, "ring", cuda_context());
    EXPECT_TRUE(ring == results_of(p, "rows", cuda_context()));
  }
}

TEST_F(CudaNormRing, GradientsMayStandWhereOthersDo) {
  for (const Norm norm : norms) {
    for (const bool in_sum : {false, true}) {
      SeededRandom random(2800);
      Problem p = random_aligned(random, 700, 4096, DType::bf16, norm);
      p.d_sum = in_sum ? random_buffer(random, DType::bf16, {700, 4096}) : Buffer();
      forward(p, cuda_context());
      p.options.kernel = "ring";
      backward(p, cuda_context());
      Problem in_place = p;
      in_place.dx = in_sum ? p.d_sum : p.dy;
      backward(in_place, cuda_context());
      EXPECT_EQ(in_place.dx.bytes(), p.dx.bytes());
    }
  }
}

TEST_F(CudaNormRing, LongAlignedRowsOf16BitsAreTakenAndOthersLeft) {
  SeededRandom random(2900);
  const auto of = [&](std::int64_t rows, std::int64_t dim, DType dtype) {
    return random_aligned(random, rows, dim, dtype, Norm::layer);
  };
  for (const std::int64_t dim : {4096, 5120, 8192}) {
    for (const DType dtype : types) EXPECT_EQ(chosen(of(3, dim, dtype)), "ring") << dim;
  }
  for (const std::int64_t dim : {512, 1000, 1024, 3584, 4088, 4104, 4352, 8704, 9216, 16384}) {
    EXPECT_EQ(chosen(of(3, dim, DType::bf16)), "rows") << dim;
  }
  EXPECT_EQ(chosen(of(3, 4096, DType::f32)), "rows");
  EXPECT_EQ(chosen(of(0, 4096, DType::bf16)), "rows");
  Problem p = of(3, 4096, DType::bf16);
  p.dx = {};
  EXPECT_EQ(chosen(p), "rows");
  p = of(3, 4096, DType::bf16);
  Placement unaligned;
  unaligned.lead = 1;
  p.dy = random_buffer(random, DType::bf16, {3, 4096}, 1, unaligned);
  EXPECT_EQ(chosen(p), "rows");
  p.options.kernel = "ring";
  EXPECT_NE(thrown<Unsupported>([&] { backward(p, cuda_context()); }).find("multiples of 16 bytes"),
            std::string::npos);
}

// By whichever kernel is chosen.
TEST_F(CudaNormRing, RowsAboutItsBordersAreNearTheTruth) {
  std::uint64_t seed = 3000;
  for (const std::int64_t dim : {3584, 4088, 4096, 4104, 8184, 8192, 8200, 8704}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      SeededRandom random(++seed);
      Problem p = random_problem(random, random.between(1, 5), dim, dtype, norms[seed % 2]);
      check(p, cuda_context());
    }
  }
  for (const DType dtype : types) {
    SeededRandom random(++seed);
    Problem p = random_problem(random, 0, 4096, dtype, Norm::layer);
    check(p, cuda_context());
    p = random_aligned(random, 5, 4096, dtype, Norm::layer);  // gradients of weights alone
    p.bias = p.d_bias = {};
    p.weight = random_buffer(random, dtype, {4096});
    p.d_weight = Buffer(dtype, {4096});
    forward(p, cuda_context());
    backward(p, cuda_context());
    const std::vector<std::byte> with_dx = p.d_weight.bytes();
    p.dx = p.d_sum = {};
    p.d_weight.poison();
    backward(p, cuda_context());
    EXPECT_EQ(with_dx, p.d_weight.bytes());
  }
}

}  // namespace
}  // namespace tilewise::test::norm_test
