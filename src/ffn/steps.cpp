#include "ffn/steps.h"

namespace tilewise {

const FfnSteps* ffn_steps(Device::Type type) {
  static_cast<void>(type);
  return nullptr;
}

}  // namespace tilewise
