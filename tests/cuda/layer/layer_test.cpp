#include "cuda/layer/device_call.h"
#include "layer/layer_case.h"

namespace tilewise::test::layer_test {
namespace {

using namespace layer_case;

class CudaLayer : public CudaLayerTest {};

TEST_F(CudaLayer, IsNearTheTruthInEveryConfiguration) {
  for_every_layer([](std::string_view name, DType dtype) {
    SeededRandom random(5000);
    check_forward(random, name, dtype, cuda_context());
  });
}

TEST_F(CudaLayer, GradientsAreNearTheTruthInEveryConfiguration) {
  for_every_layer([](std::string_view name, DType dtype) {
    SeededRandom random(5001);
    check_backward(random, name, dtype, cuda_context());
  });
}

}  // namespace
}  // namespace tilewise::test::layer_test
