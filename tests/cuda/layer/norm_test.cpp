#include "cuda/layer/device_call.h"
#include "layer/norm_case.h"

namespace tilewise::test {
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
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const Norm norm : {Norm::rms, Norm::layer}) {
        SeededRandom random(++seed);
        Problem p = random_problem(random, 5, dim, dtype, norm);
        check(p, cuda_context());
      }
    }
  }
}

TEST_F(CudaNorm, ManyRowsAreNearTheTruthAndGiveTheSameBitsAgain) {
  for (const std::int64_t dim : {128, 768, 2048}) {
    SeededRandom random(2300);
    Problem p = random_problem(random, 3000, dim, DType::bf16, Norm::layer);
    check(p, cuda_context());
    const std::vector<std::byte> first = p.d_weight.given() ? p.d_weight.bytes() : p.dx.bytes();
    backward(p, cuda_context());
    EXPECT_EQ(first, p.d_weight.given() ? p.d_weight.bytes() : p.dx.bytes());
  }
}

TEST_F(CudaNorm, NoRowsAreValid) {
  SeededRandom random(2400);
  Problem p = random_problem(random, 0, 64, DType::f32, Norm::rms);
  check(p, cuda_context());
}

}  // namespace
}  // namespace tilewise::test
