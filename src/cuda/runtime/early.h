#pragma once

#include "cuda/runtime/device.h"

namespace tilewise::cuda {

/// Whether the device has PDL: a kernel can start before the previous one has ended (Launch::early).
inline bool has_pdl(const Device& device) { return device_properties(device.index).compute_capability >= 90; }

}  // namespace tilewise::cuda
