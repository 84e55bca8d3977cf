#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline float tanh_approx(float x) { return tanhf(x); }

}  // namespace tilewise::cuda
