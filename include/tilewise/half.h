#pragma once

#include <bit>
#include <cstdint>

namespace tilewise {

// The two 16-bit floating types as plain bits. Conversions round to nearest, ties to even, and keep
// subnormals, infinities and NaN (which becomes quiet).

constexpr float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) {  // infinity or NaN; the quiet bit is set on a NaN
    const std::uint32_t payload = mantissa == 0 ? 0u : (mantissa << 13) | 0x400000u;
    return std::bit_cast<float>(sign | 0x7f800000u | payload);
  }
  if (exponent == 0) {  // zero or subnormal: mantissa · 2^-24, exact in f32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

constexpr std::uint16_t float_to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    return static_cast<std::uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal, in units of 2^-24
    // The last mantissa bit of 0.5 is worth 2^-24, so adding 0.5 rounds to a multiple of that.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t round = 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((magnitude + round - 0x38000000u) >> 13));
}

constexpr float bf16_to_float(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
  return std::bit_cast<float>(nan ? wide | 0x400000u : wide);
}

constexpr std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// IEEE binary16.
struct f16 {
  std::uint16_t bits = 0;
  f16() = default;
  constexpr explicit f16(float value) : bits(float_to_f16(value)) {}
  constexpr explicit operator float() const { return f16_to_float(bits); }
};

/// bfloat16: the upper half of an f32.
struct bf16 {
  std::uint16_t bits = 0;
  bf16() = default;
  constexpr explicit bf16(float value) : bits(float_to_bf16(value)) {}
  constexpr explicit operator float() const { return bf16_to_float(bits); }
};

}  // namespace tilewise
