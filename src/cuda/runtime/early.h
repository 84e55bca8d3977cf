#pragma once

#include "cuda/runtime/device.h"

namespace tilewise::cuda {

/// Whether a kernel can begin there before the one ahead of it has ended (Launch::early).
inline bool begins_early(const Device& device) {
  return device_properties(device.index).compute_capability >= 90;
}

}  // namespace tilewise::cuda
