#pragma once

#include "cuda/ptx/math.cuh"
#include "tilewise/activation.h"

namespace tilewise::cuda {

// Activations and their derivatives. With `approximate`, for results that are rounded to 16 bits, tanh is
// that of the special function unit, whose error of 2^-11 is below that of the rounding. gelu is computed
// from it, too, since erff takes many more instructions.

template <bool approximate>
__device__ __forceinline__ float tanh_of(float x) {
  if constexpr (approximate) return tanh_approx(x);
  return tanhf(x);
}
/// 1 / (1 + exp(-x))
template <bool approximate>
__device__ __forceinline__ float logistic(float x) {
  if constexpr (approximate) return 0.5f + 0.5f * tanh_approx(0.5f * x);
  return 1.0f / (1.0f + expf(-x));
}

/// The argument of tanh in gelu_tanh.
__device__ __forceinline__ float gelu_argument(float x) {
  return x * (0.7978845608f + 0.0356774081f * x * x);
}

/// The argument of tanh in gelu: atanh(erf(x / √2)), fitted so that the error of gelu is at most 2.5e-5.
/// Where the square is clamped, tanh is 1 to its accuracy.
__device__ __forceinline__ float exact_gelu_argument(float x) {
  const float square = fminf(x * x, 25.0f);
  return x * (0.7975065864f + square * (0.0370068271f - 0.0003517086375f * square));
}

template <Activation activation, bool approximate>
__device__ __forceinline__ float activate(float x) {
  if constexpr (activation == Activation::relu) return x < 0 ? 0.0f : x;  // keeps a NaN
  if constexpr (activation == Activation::gelu && !approximate) {
    return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
  }
  if constexpr (activation == Activation::gelu) {
    const float half = 0.5f * x;
    return half + half * tanh_approx(exact_gelu_argument(x));
  }
  if constexpr (activation == Activation::gelu_tanh) {
    const float half = 0.5f * x;
    return half + half * tanh_of<approximate>(gelu_argument(x));
  }
  if constexpr (activation == Activation::silu) return x * logistic<approximate>(x);
  return x;
}

/// The derivative of the activation.
template <Activation activation, bool approximate>
__device__ __forceinline__ float slope(float x) {
  if constexpr (activation == Activation::relu) return x > 0 ? 1.0f : 0.0f;
  if constexpr (activation == Activation::gelu) {
    return 0.5f * (1.0f + erff(x * 0.7071067812f)) + x * 0.3989422804f * expf(-0.5f * x * x);
  }
  if constexpr (activation == Activation::gelu_tanh) {
    const float t = tanh_of<approximate>(gelu_argument(x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * (0.7978845608f + 3.0f * 0.0356774081f * x * x);
  }
  if constexpr (activation == Activation::silu) {
    const float s = logistic<approximate>(x);
    return s * (1.0f + x * (1.0f - s));
  }
  return 1.0f;
}

/// Calls `body` with the activation as a constant.
template <typename Body>
__device__ __forceinline__ void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::none: body.template operator()<Activation::none>(); break;
    case Activation::relu: body.template operator()<Activation::relu>(); break;
    case Activation::gelu: body.template operator()<Activation::gelu>(); break;
    case Activation::gelu_tanh: body.template operator()<Activation::gelu_tanh>(); break;
    case Activation::silu: body.template operator()<Activation::silu>(); break;
  }
}

/// Applies the activation to an array, with the branch outside of the loop.
template <bool approximate, int count>
__device__ __forceinline__ void activate_all(float (&x)[count], Activation activation) {
  with_activation(activation, [&]<Activation f>() {
    if constexpr (f != Activation::none) {
#pragma unroll
      for (int n = 0; n < count; ++n) x[n] = activate<f, approximate>(x[n]);
    }
  });
}

}  // namespace tilewise::cuda
