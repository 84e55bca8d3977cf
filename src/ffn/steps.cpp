#include "ffn/steps.h"

namespace tilewise {

const FfnSteps* ffn_steps(Device::Type type) {
  return type == Device::Type::cpu ? &cpu::simd_ffn_steps : nullptr;
}

}  // namespace tilewise
