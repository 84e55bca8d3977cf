#pragma once

#include "cuda/gemm/arguments.h"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda {

// Activations of f32 whose result is rounded to 16 bits: tanh by the special function unit, whose error of
// 2^-11 is below theirs.

__device__ __forceinline__ float gelu_tanh_approx(float x) {
  const float h = 0.5f * x;
  return h + h * tanh_approx(x * (0.7978845608f + 0.0356774081f * x * x));
}
__device__ __forceinline__ float gelu_erf(float x) {
  const float h = 0.5f * x;
  return h + h * erff(x * 0.7071067812f);
}
__device__ __forceinline__ float silu_approx(float x) {
  const float h = 0.5f * x;
  return h + h * tanh_approx(h);
}

/// All of an array, the branch outside.
template <int count>
__device__ __forceinline__ void activate_approx(float (&x)[count], gemm::Activation activation) {
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int n = 0; n < count; ++n) x[n] = f(x[n]);
  };
  switch (activation) {
    case gemm::Activation::none: break;
    case gemm::Activation::gelu_tanh: each([](float v) { return gelu_tanh_approx(v); }); break;
    case gemm::Activation::gelu_erf: each([](float v) { return gelu_erf(v); }); break;
    case gemm::Activation::relu: each([](float v) { return fmaxf(v, 0.0f); }); break;
    case gemm::Activation::silu: each([](float v) { return silu_approx(v); }); break;
  }
}

}  // namespace tilewise::cuda
