#include <algorithm>

#include "cuda/layer/device_call.h"
#include "layer/norm_case.h"

namespace tilewise::test::norm_test {
namespace {

using namespace norm_case;

class CudaNorm : public CudaLayerTest {};

TEST_F(CudaNorm, BothPassesAreNearTheTruthForEveryType) {
  std::uint64_t seed = 2000;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Norm norm : {Norm::rms, Norm::layer}) {
      for (int repeat = 0; repeat < 12; ++repeat) {
        SeededRandom random(++seed);
        Problem p = random_problem(random, random.between(1, 40), random.between(1, 700), dtype, norm);
        check(p, cuda_context());
      }
    }
  }
}

TEST_F(CudaNorm, RowsOfEveryShapeAreNearTheTruth) {
  std::uint64_t seed = 2200;
  for (const std::int64_t dim : {64, 256, 768, 1024, 1032, 4096, 8192, 9000, 16384, 33000}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const Norm norm : {Norm::rms, Norm::layer}) {
        SeededRandom random(++seed);
        Problem p = random_problem(random, 5, dim, dtype, norm);
        check(p, cuda_context());
      }
    }
  }
}

// Rows of a block one after another, in which threads all have equally much or not.
TEST_F(CudaNorm, ManyRowsAreNearTheTruthAndGiveTheSameBitsAgain) {
  struct Shape {
    std::int64_t rows, dim;
    DType dtype;
  };
  std::uint64_t seed = 2300;
  for (const auto& [rows, dim, dtype] :
       {Shape{2000, 128, DType::bf16}, Shape{1500, 768, DType::f16}, Shape{1300, 1000, DType::bf16},
        Shape{600, 2048, DType::bf16}, Shape{280, 4096, DType::f16}}) {
    for (const Norm norm : {Norm::rms, Norm::layer}) {
      SeededRandom random(++seed);
      Problem p = random_problem(random, rows, dim, dtype, norm);
      check(p, cuda_context());
      const std::vector<std::byte> first = p.d_weight.given() ? p.d_weight.bytes() : p.dx.bytes();
      backward(p, cuda_context());
      EXPECT_EQ(first, p.d_weight.given() ? p.d_weight.bytes() : p.dx.bytes());
    }
  }
}

// Blocks that stay have more than 32 rows each; the same row gives the same gradient wherever it is.
TEST_F(CudaNorm, GradientsOfRowsDoNotDependOnHowManyThereAre) {
  constexpr std::int64_t few = 100, copies = 45, dim = 8192;
  for (const Norm norm : {Norm::rms, Norm::layer}) {
    SeededRandom random(2390);
    const auto problem = [&](std::int64_t rows) {
      Problem p;
      p.options.norm = norm;
      for (const auto member : {&Problem::x, &Problem::y, &Problem::dy, &Problem::dx}) {
        p.*member = Buffer(DType::bf16, {rows, dim});
      }
      p.rstd = Buffer(DType::f32, {rows});
      if (norm == Norm::layer) p.mean = Buffer(DType::f32, {rows});
      return p;
    };
    Problem one = problem(few), many = problem(few * copies);
    for (const auto member : {&Problem::x, &Problem::dy}) {
      (one.*member).fill_random(random);
      const std::vector<std::byte> bytes = (one.*member).bytes();
      auto* to = static_cast<std::byte*>((many.*member).view().data);
      for (std::int64_t copy = 0; copy < copies; ++copy) to = std::copy(bytes.begin(), bytes.end(), to);
    }
    for (Problem* p : {&one, &many}) {
      forward(*p, cuda_context());
      backward(*p, cuda_context());
    }
    const std::vector<std::byte> expected = one.dx.bytes();
    const auto* found = static_cast<const std::byte*>(many.dx.view().data);
    for (std::int64_t copy = 0; copy < copies; ++copy) {
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), found)) << "copy " << copy;
      found += expected.size();
    }
  }
}

TEST_F(CudaNorm, NoRowsAreValid) {
  SeededRandom random(2400);
  Problem p = random_problem(random, 0, 64, DType::f32, Norm::rms);
  check(p, cuda_context());
}

}  // namespace
}  // namespace tilewise::test::norm_test
