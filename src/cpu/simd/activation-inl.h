// The activations and their derivatives on vectors of f32.

#if defined(TILEWISE_CPU_SIMD_ACTIVATION_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_ACTIVATION_INL_H
#undef TILEWISE_CPU_SIMD_ACTIVATION_INL_H
#else
#define TILEWISE_CPU_SIMD_ACTIVATION_INL_H
#endif

#include "cpu/simd/vector-inl.h"
#include "tilewise/activation.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

/// The normal distribution: Φ(x), and e^(−x²/2), which is its density but for a constant factor.
struct Normal {
  VF cumulative;
  VF bell;
};

/// Φ(−|x|) = e^(−x²/2)·h(1 / (1 + 0.3·|x|)), where h is a polynomial with a relative error of 6e-8. So the
/// tail below 0 keeps its relative accuracy; 1 + erf would lose it.
HWY_INLINE Normal normal_of(VF x) {
  const VF magnitude = hn::Abs(x);
  const VF t = hn::Div(set(1.0f), hn::MulAdd(magnitude, set(0.3f), set(1.0f)));
  VF h = set(0.038271245f);
  h = hn::MulAdd(h, t, set(-0.16864465f));
  h = hn::MulAdd(h, t, set(0.22758019f));
  h = hn::MulAdd(h, t, set(-0.07526787f));
  h = hn::MulAdd(h, t, set(0.1416772f));
  h = hn::MulAdd(h, t, set(0.09505053f));
  h = hn::MulAdd(h, t, set(0.12182602f));
  h = hn::MulAdd(h, t, set(0.11950098f));
  h = hn::MulAdd(h, t, set(6.3840744e-6f));
  const VF bell = exp_of(hn::Mul(hn::Mul(x, x), set(-0.5f)));
  const VF tail = hn::Mul(bell, h);
  return {hn::IfThenElse(hn::Lt(x, hn::Zero(F())), tail, hn::Sub(set(1.0f), tail)), bell};
}

/// 1 / (1 + e^−x).
HWY_INLINE VF sigmoid_of(VF x) {
  const VF one = set(1.0f);
  return hn::Div(one, hn::Add(one, exp_of(hn::Min(set(87.0f), hn::Neg(x)))));
}

/// The tanh inside gelu_tanh.
HWY_INLINE VF gelu_inner_tanh(VF x) {
  const VF cubic = hn::MulAdd(hn::Mul(x, x), set(0.044715f), set(1.0f));
  return tanh_of(hn::Mul(hn::Mul(x, set(0.7978845608f)), cubic));
}

template <Activation activation>
HWY_INLINE VF activate(VF x) {
  if constexpr (activation == Activation::relu) {
    return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(F())), x);  // NaN stays NaN
  } else if constexpr (activation == Activation::gelu) {
    return hn::Mul(x, normal_of(x).cumulative);
  } else if constexpr (activation == Activation::gelu_tanh) {
    return hn::Mul(hn::Mul(x, set(0.5f)), hn::Add(set(1.0f), gelu_inner_tanh(x)));
  } else if constexpr (activation == Activation::silu) {
    return hn::Mul(x, sigmoid_of(x));
  } else {
    return x;
  }
}

struct ValueAndDerivative {
  VF value, derivative;
};

template <Activation activation>
HWY_INLINE ValueAndDerivative activate_with_derivative(VF x) {
  const VF one = set(1.0f);
  if constexpr (activation == Activation::relu) {
    const VF derivative = hn::IfThenElseZero(hn::Gt(x, hn::Zero(F())), one);
    return {activate<activation>(x), derivative};
  } else if constexpr (activation == Activation::gelu) {
    const Normal normal = normal_of(x);
    const VF density = hn::Mul(normal.bell, set(0.3989422804f));
    return {hn::Mul(x, normal.cumulative), hn::MulAdd(x, density, normal.cumulative)};
  } else if constexpr (activation == Activation::gelu_tanh) {
    const VF t = gelu_inner_tanh(x);
    const VF half = hn::Mul(set(0.5f), hn::Add(one, t));
    const VF inner = hn::MulAdd(hn::Mul(x, x), set(0.7978845608f * 3 * 0.044715f), set(0.7978845608f));
    const VF outer = hn::Mul(hn::Mul(x, set(0.5f)), hn::NegMulAdd(t, t, one));
    return {hn::Mul(x, half), hn::MulAdd(outer, inner, half)};
  } else if constexpr (activation == Activation::silu) {
    const VF s = sigmoid_of(x);
    return {hn::Mul(x, s), hn::Mul(s, hn::MulAdd(x, hn::Sub(one, s), one))};
  } else {
    return {x, one};
  }
}

template <Activation value>
struct ActivationTag {
  static constexpr Activation activation = value;
};

/// Calls body(ActivationTag<…>()) for the activation.
template <typename Body>
HWY_INLINE void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::none: return body(ActivationTag<Activation::none>());
    case Activation::relu: return body(ActivationTag<Activation::relu>());
    case Activation::gelu: return body(ActivationTag<Activation::gelu>());
    case Activation::gelu_tanh: return body(ActivationTag<Activation::gelu_tanh>());
    case Activation::silu: return body(ActivationTag<Activation::silu>());
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
