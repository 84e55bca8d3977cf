#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

inline uint4 load_once(const void* from_gmem, bool valid) {
  return valid ? *static_cast<const uint4*>(from_gmem) : uint4{0, 0, 0, 0};
}

}  // namespace tilewise::cuda
