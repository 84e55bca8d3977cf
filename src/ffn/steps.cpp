#include "ffn/steps.h"

namespace tilewise {

const FfnSteps* ffn_steps(Device::Type type) {
#ifdef TILEWISE_HAS_CUDA
  if (type == Device::Type::cuda) return &cuda::ffn_steps;
#endif
  return type == Device::Type::cpu ? &cpu::simd_ffn_steps : nullptr;
}

}  // namespace tilewise
