// Vectors of f32: loads, stores, conversions from and to the storage types, exp and tanh.

#if defined(TILEWISE_CPU_SIMD_VECTOR_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_VECTOR_INL_H
#undef TILEWISE_CPU_SIMD_VECTOR_INL_H
#else
#define TILEWISE_CPU_SIMD_VECTOR_INL_H
#endif

#include <cstddef>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "tilewise/dtype.h"
#include "tilewise/half.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using I = hn::RebindToSigned<F>;
using U = hn::RebindToUnsigned<F>;
using VF = hn::Vec<F>;
using VI = hn::Vec<I>;
using VU = hn::Vec<U>;

inline constexpr int lanes = static_cast<int>(hn::MaxLanes(F()));
inline constexpr float log2e = 1.44269504088896340736f;
inline constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// `count` rounded up to whole vectors.
constexpr std::int64_t padded(std::int64_t count) { return (count + lanes - 1) / lanes * lanes; }

HWY_INLINE VF load(const float* from) { return hn::LoadU(F(), from); }
HWY_INLINE void store(VF v, float* to) { hn::StoreU(v, F(), to); }
HWY_INLINE VF set(float value) { return hn::Set(F(), value); }

/// e^x for x below 88, −inf included, with an error of at most one unit in the last place. Results below
/// 2^-126.5 are 0, and NaN stays NaN.
HWY_INLINE VF exp_of(VF x) {
  const F f;
  // Adding 1.5·2^23 rounds x·log2 e to an integer n. Adding 127 as well leaves n + 127, the biased exponent
  // of 2^n, in the low bits, from which a shift moves it into place.
  const VF magic = set(12582912.0f + 127.0f);
  x = hn::Max(set(-127 / log2e), x);  // in this order of operands x86 returns a NaN of x
  const VF shifted = hn::MulAdd(x, set(log2e), magic);
  const VF n = hn::Sub(shifted, magic);
  const VF power = hn::BitCast(f, hn::ShiftLeft<23>(hn::BitCast(U(), shifted)));
  // r = x − n·ln 2, with ln 2 as the sum of two constants. n times the first is exact; with a rounded product
  // the error would grow with x.
  VF r = hn::NegMulAdd(n, set(355.0f / 512), x);
  r = hn::NegMulAdd(n, set(-0.00021219444f), r);
  // A minimax polynomial 1 + r + … for |r| up to ln 2 / 2. With its coefficients rounded to f32 its relative
  // error is 4e-9.
  VF p = set(0.001381454f);
  p = hn::MulAdd(p, r, set(0.008368745f));
  p = hn::MulAdd(p, r, set(0.04166839f));
  p = hn::MulAdd(p, r, set(0.16666521f));
  p = hn::MulAdd(p, r, set(0.49999994f));
  p = hn::MulAdd(p, r, set(1.0f));
  p = hn::MulAdd(p, r, set(1.0f));
  return hn::Mul(p, power);
}

/// tanh, with an error of at most two units in the last place: 1 − 2 / (e^2|x| + 1), or, for small x, where
/// that difference would cancel, a polynomial in x² whose relative error is 7e-9.
HWY_INLINE VF tanh_of(VF x) {
  const VF magnitude = hn::Min(hn::Abs(x), set(10.0f));  // tanh is 1 from 9.1 on
  const VF one = set(1.0f);
  const VF large = hn::Sub(one, hn::Div(set(2.0f), hn::Add(exp_of(hn::Add(magnitude, magnitude)), one)));
  const VF square = hn::Mul(x, x);
  VF p = set(-0.005666975f);
  p = hn::MulAdd(p, square, set(0.020606175f));
  p = hn::MulAdd(p, square, set(-0.053730007f));
  p = hn::MulAdd(p, square, set(0.13331331f));
  p = hn::MulAdd(p, square, set(-0.33333278f));
  const VF small = hn::MulAdd(hn::Mul(p, square), x, x);
  return hn::IfThenElse(hn::Lt(hn::Abs(x), set(0.63f)), small, hn::CopySign(large, x));
}

/// to[0, count) = factor · from[0, count). The functions below do the same for 16-bit types.
HWY_INLINE void widen_f32(float* HWY_RESTRICT to, const float* HWY_RESTRICT from, int count, float factor) {
  int n = 0;
  const VF scale = set(factor);
  for (; n + lanes <= count; n += lanes) store(hn::Mul(load(from + n), scale), to + n);
  for (; n < count; ++n) to[n] = from[n] * factor;
}

HWY_INLINE void widen_bf16(float* HWY_RESTRICT to, const std::uint16_t* HWY_RESTRICT from, int count,
                           float factor) {
  const hn::Rebind<std::uint16_t, U> half;
  const VF scale = set(factor);
  int n = 0;
  for (; n + lanes <= count; n += lanes) {
    const VU wide = hn::ShiftLeft<16>(hn::PromoteTo(U(), hn::LoadU(half, from + n)));
    store(hn::Mul(hn::BitCast(F(), wide), scale), to + n);
  }
  for (; n < count; ++n) to[n] = bf16_to_float(from[n]) * factor;
}

HWY_INLINE void widen_f16(float* HWY_RESTRICT to, const std::uint16_t* HWY_RESTRICT from, int count,
                          float factor) {
  int n = 0;
#if HWY_TARGET != HWY_SSE4  // which has no F16C: all elements take the scalar loop below
  const hn::Rebind<hwy::float16_t, F> half;
  const VF scale = set(factor);
  const auto* halves = reinterpret_cast<const hwy::float16_t*>(from);
  for (; n + lanes <= count; n += lanes) {
    store(hn::Mul(hn::PromoteTo(F(), hn::LoadU(half, halves + n)), scale), to + n);
  }
#endif
  for (; n < count; ++n) to[n] = f16_to_float(from[n]) * factor;
}

/// Converts a row of a boolean mask to an additive mask: 0 where true, −inf where false.
HWY_INLINE void widen_boolean(float* HWY_RESTRICT to, const std::uint8_t* HWY_RESTRICT from, int count) {
  const hn::Rebind<std::uint8_t, U> byte;
  int n = 0;
  for (; n + lanes <= count; n += lanes) {
    const VU wide = hn::PromoteTo(U(), hn::LoadU(byte, from + n));
    const auto hidden = hn::RebindMask(F(), hn::Eq(wide, hn::Zero(U())));
    store(hn::IfThenElseZero(hidden, set(minus_infinity)), to + n);
  }
  for (; n < count; ++n) to[n] = from[n] != 0 ? 0.0f : minus_infinity;
}

inline void widen(float* to, const std::byte* from, DType dtype, int count, float factor) {
  switch (dtype) {
    case DType::f32: widen_f32(to, reinterpret_cast<const float*>(from), count, factor); break;
    case DType::f16: widen_f16(to, reinterpret_cast<const std::uint16_t*>(from), count, factor); break;
    case DType::bf16: widen_bf16(to, reinterpret_cast<const std::uint16_t*>(from), count, factor); break;
    case DType::boolean: widen_boolean(to, reinterpret_cast<const std::uint8_t*>(from), count); break;
    case DType::f64:
    case DType::i32:
    case DType::i64: break;  // these kernels do not take them
  }
}

HWY_INLINE void narrow_bf16(std::uint16_t* HWY_RESTRICT to, const float* HWY_RESTRICT from, int count) {
  const hn::Rebind<std::uint16_t, U> half;
  int n = 0;
  for (; n + lanes <= count; n += lanes) {
    const VU bits = hn::BitCast(U(), load(from + n));
    const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(U(), 1u));
    const VU rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(U(), 0x7fffu))));
    const VU quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(U(), 0x40u));
    const auto nan =
        hn::Gt(hn::BitCast(I(), hn::And(bits, hn::Set(U(), 0x7fffffffu))), hn::Set(I(), 0x7f800000));
    // The words are below 2^16, so a saturating demotion of the signed view keeps them.
    const VU word = hn::IfThenElse(hn::RebindMask(U(), nan), quiet, rounded);
    hn::StoreU(hn::DemoteTo(half, hn::BitCast(I(), word)), half, to + n);
  }
  for (; n < count; ++n) to[n] = float_to_bf16(from[n]);
}

HWY_INLINE void narrow_f16(std::uint16_t* HWY_RESTRICT to, const float* HWY_RESTRICT from, int count) {
  int n = 0;
#if HWY_TARGET != HWY_SSE4
  const hn::Rebind<hwy::float16_t, F> half;
  auto* halves = reinterpret_cast<hwy::float16_t*>(to);
  for (; n + lanes <= count; n += lanes) hn::StoreU(hn::DemoteTo(half, load(from + n)), half, halves + n);
#endif
  for (; n < count; ++n) to[n] = float_to_f16(from[n]);
}

/// Rounds from[0, count) to a floating type.
inline void narrow(std::byte* to, DType dtype, const float* from, int count) {
  switch (dtype) {
    case DType::f32: widen_f32(reinterpret_cast<float*>(to), from, count, 1.0f); break;
    case DType::f16: narrow_f16(reinterpret_cast<std::uint16_t*>(to), from, count); break;
    case DType::bf16: narrow_bf16(reinterpret_cast<std::uint16_t*>(to), from, count); break;
    case DType::f64:
    case DType::boolean:
    case DType::i32:
    case DType::i64: break;  // these kernels do not take them
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
