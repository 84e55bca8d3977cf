#pragma once

#include <cmath>

#include "tilewise/activation.h"

namespace tilewise {

// The definitions of the activations and their derivatives, in f64. Fast kernels have their own versions.

inline constexpr double inverse_sqrt_2 = 0.70710678118654752440;
inline constexpr double inverse_sqrt_2pi = 0.39894228040143267794;
inline constexpr double sqrt_2_over_pi = 0.79788456080286535588;
inline constexpr double gelu_cubic = 0.044715;

inline double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return x < 0 ? 0 : x;  // NaN stays NaN
    case Activation::gelu: return 0.5 * x * (1 + std::erf(x * inverse_sqrt_2));
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(sqrt_2_over_pi * (x + gelu_cubic * x * x * x)));
    case Activation::silu: return x / (1 + std::exp(-x));
  }
  return x;
}

/// The derivative of relu at 0 is 0, as in PyTorch.
inline double activation_derivative(Activation activation, double x) {
  switch (activation) {
    case Activation::none: return 1;
    case Activation::relu: return x > 0 ? 1 : 0;
    case Activation::gelu:
      return 0.5 * (1 + std::erf(x * inverse_sqrt_2)) + x * inverse_sqrt_2pi * std::exp(-0.5 * x * x);
    case Activation::gelu_tanh: {
      const double t = std::tanh(sqrt_2_over_pi * (x + gelu_cubic * x * x * x));
      return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt_2_over_pi * (1 + 3 * gelu_cubic * x * x);
    }
    case Activation::silu: {
      const double s = 1 / (1 + std::exp(-x));
      return s * (1 + x * (1 - s));
    }
  }
  return 1;
}

}  // namespace tilewise
