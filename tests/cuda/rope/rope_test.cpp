#include "cuda/layer/device_call.h"
#include "layer/rope_case.h"

namespace tilewise::test::rope_test {
namespace {

using namespace rope_case;

class CudaRope : public CudaLayerTest {};

TEST_F(CudaRope, EveryFormIsNearTheTruth) {
  std::uint64_t seed = 3000;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (int repeat = 0; repeat < 40; ++repeat) {
      SeededRandom random(++seed);
      // Every second row lies in chunks of 16 bytes.
      const std::int64_t dim = repeat % 2 == 0 ? 16 * random.between(1, 12) : random.between(1, 150);
      const std::int64_t rotary = repeat % 2 == 0      ? 16 * random.between(1, dim / 16)
                                  : random.chance(0.5) ? dim / 2 * 2
                                                       : random.between(0, dim / 2) * 2;
      const Sizes n{random.between(1, 3),
                    random.between(1, 9),
                    random.between(1, 3),
                    random.between(1, 20),
                    dim,
                    rotary,
                    repeat % 2 == 0 ? 8 * random.between(1, 9) : random.between(1, 40)};
      Problem p = random_problem(random, n, dtype);
      if (random.chance(0.5)) add_cache(p, random, n, random.chance(0.5));
      check(p, cuda_context());
    }
  }
}

TEST_F(CudaRope, ManyHeadsAreNearTheTruth) {
  std::uint64_t seed = 3100;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t length : {1, 3, 4, 37, 49}) {
      SeededRandom random(++seed);
      const std::int64_t dim = 32 * random.between(1, 4);
      const std::int64_t batch = length >= 37 ? 12 : random.between(1, 2);  // more tokens than share a block
      const Sizes n{batch, random.between(30, 70),        random.between(1, 20),   length,
                    dim,   random.chance(0.5) ? dim : 16, 8 * random.between(1, 9)};
      Problem p = random_problem(random, n, dtype);
      if (random.chance(0.5)) add_cache(p, random, n, random.chance(0.5));
      check(p, cuda_context());
    }
  }
}

TEST_F(CudaRope, InPlaceIsTheSame) {
  SeededRandom random(3200);
  const Sizes n{2, 4, 2, 9, 64, 64, 64};
  Problem p = random_problem(random, n, DType::bf16);
  Problem apart = p;
  apart.out_q = Buffer(DType::bf16, p.q.shape());
  apart.out_k = Buffer(DType::bf16, p.k.shape());
  run(apart, cuda_context());
  p.out_q = p.q;
  p.out_k = p.k;
  run(p, cuda_context());
  EXPECT_EQ(p.q.bytes(), apart.out_q.bytes());
  EXPECT_EQ(p.k.bytes(), apart.out_k.bytes());
}

}  // namespace
}  // namespace tilewise::test::rope_test
