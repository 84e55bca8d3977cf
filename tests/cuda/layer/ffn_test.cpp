#include "cuda/layer/device_call.h"
#include "layer/ffn_case.h"

namespace tilewise::test {
namespace {

using namespace ffn_case;

class CudaFfn : public CudaLayerTest {};

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

TEST_F(CudaFfn, ABoundOnMemoryChangesNothing) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    SeededRandom random(4200);
    Problem p = random_problem(random, {150, 64, 200, 64}, dtype, Activation::silu, true);
    p.options.max_intermediate_bytes = 20000;
    check_forward(p, cuda_context());
    check_backward(p, cuda_context());
  }
}

TEST_F(CudaFfn, NoTokensAreValid) {
  SeededRandom random(4300);
  Problem p = random_problem(random, {0, 16, 32, 16}, DType::bf16, Activation::gelu, false);
  check_forward(p, cuda_context());
  check_backward(p, cuda_context());
}

}  // namespace
}  // namespace tilewise::test
