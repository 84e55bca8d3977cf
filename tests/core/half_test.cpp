#include "tilewise/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>

#include "support/random.h"

namespace tilewise {
namespace {

// A 16-bit format as IEEE 754 describes it, and the two conversions under test. The model below works in
// exact f64 arithmetic and shares nothing with the bit tricks of the implementation.
struct Format {
  const char* name;
  int mantissa_bits;
  int bias;
  float (*widen)(std::uint16_t);
  std::uint16_t (*narrow)(float);

  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(0x7fff >> mantissa_bits << mantissa_bits);
  }
  std::uint16_t quiet_bit() const { return static_cast<std::uint16_t>(1 << (mantissa_bits - 1)); }

  // The magnitude behind a code without its sign. The code of infinity gives the value that would follow the
  // largest finite one, were the exponent unbounded: rounding to infinity is defined by it.
  double magnitude(int code) const {
    const int exponent = code >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }

  // Nearest code to a value that is not NaN, ties to the even one.
  std::uint16_t nearest(float value) const {
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const double target = std::abs(static_cast<double>(value));
    int below = 0;
    int above = infinity();
    if (target >= magnitude(above)) return static_cast<std::uint16_t>(sign | above);
    while (above - below > 1) {  // magnitude(below) <= target < magnitude(above)
      const int middle = (below + above) / 2;
      (magnitude(middle) <= target ? below : above) = middle;
    }
    const double down = target - magnitude(below);
    const double up = magnitude(above) - target;
    const bool take_below = down < up || (down == up && below % 2 == 0);
    return static_cast<std::uint16_t>(sign | (take_below ? below : above));
  }
};

std::ostream& operator<<(std::ostream& out, const Format& format) { return out << format.name; }

class HalfTest : public testing::TestWithParam<Format> {
 protected:
  // Counts rather than expects: a wrong conversion would otherwise print a hundred thousand failures.
  void check_rounding(float value) {
    const std::uint16_t expected = GetParam().nearest(value);
    const std::uint16_t given = GetParam().narrow(value);
    if (expected == given) return;
    if (failures_++ == 0) {
      ADD_FAILURE() << "first failure: " << std::hexfloat << value << " gives 0x" << std::hex << given
                    << " instead of 0x" << expected;
    }
  }
  void TearDown() override { EXPECT_EQ(failures_, 0); }

 private:
  int failures_ = 0;
};

bool is_quiet_nan(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return (bits & 0x7f800000u) == 0x7f800000u && (bits & 0x400000u) != 0;
}

TEST_P(HalfTest, EveryFiniteCodeWidensToItsExactValue) {
  const Format& format = GetParam();
  for (int code = 0; code < format.infinity(); ++code) {
    for (const int sign : {0, 0x8000}) {
      const float value = format.widen(static_cast<std::uint16_t>(sign | code));
      ASSERT_EQ(std::abs(static_cast<double>(value)), format.magnitude(code)) << std::hex << (sign | code);
      ASSERT_EQ(std::signbit(value), sign != 0) << std::hex << (sign | code);
    }
  }
}

TEST_P(HalfTest, InfinitiesWidenToInfinitiesAndNansToQuietNans) {
  const Format& format = GetParam();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(format.widen(format.infinity()), infinity);
  EXPECT_EQ(format.widen(static_cast<std::uint16_t>(0x8000 | format.infinity())), -infinity);
  for (int code = format.infinity() + 1; code < 0x8000; ++code) {
    for (const int sign : {0, 0x8000}) {
      const float value = format.widen(static_cast<std::uint16_t>(sign | code));
      ASSERT_TRUE(is_quiet_nan(value)) << std::hex << (sign | code);
      ASSERT_EQ(std::signbit(value), sign != 0) << std::hex << (sign | code);
    }
  }
}

TEST_P(HalfTest, AllCodesSurviveTheWayToFloatAndBack) {
  const Format& format = GetParam();
  for (int code = 0; code <= 0xffff; ++code) {
    const bool nan = (code & 0x7fff) > format.infinity();
    const int expected = nan ? code | format.quiet_bit() : code;
    ASSERT_EQ(format.narrow(format.widen(static_cast<std::uint16_t>(code))), expected) << std::hex << code;
  }
}

TEST_P(HalfTest, RoundsToNearestEvenAtAndAroundEveryValueAndMidpoint) {
  const Format& format = GetParam();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (int code = 0; code < format.infinity(); ++code) {
    const double here = format.magnitude(code);
    const auto value = static_cast<float>(here);
    const auto midpoint = static_cast<float>((here + format.magnitude(code + 1)) / 2);
    ASSERT_EQ(static_cast<double>(midpoint) - here,
              format.magnitude(code + 1) - static_cast<double>(midpoint));
    for (const float exact : {value, midpoint}) {
      for (const float near : {exact, std::nextafter(exact, 0.0f), std::nextafter(exact, infinity)}) {
        check_rounding(near);
        check_rounding(-near);
      }
    }
  }
}

TEST_P(HalfTest, RandomFloatsRoundToTheNearest) {
  constexpr std::uint64_t seed = 20240611;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  test::Random random(seed);
  for (int n = 0; n < 300'000; ++n) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
    if (!std::isnan(value)) check_rounding(value);
  }
  // Those land mostly outside the range of f16; these inside it.
  for (int n = 0; n < 300'000; ++n) check_rounding(static_cast<float>(random.normal()));
}

TEST_P(HalfTest, EveryKindOfNanNarrowsToAQuietNanOfTheSameSign) {
  const Format& format = GetParam();
  for (int bit = 0; bit < 23; ++bit) {  // one bit of payload each, signalling but for the last
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const auto nan = std::bit_cast<float>(sign | 0x7f800000u | (1u << bit));
      const std::uint16_t code = format.narrow(nan);
      EXPECT_GT(code & 0x7fff, format.infinity()) << "payload bit " << bit;
      EXPECT_NE(code & format.quiet_bit(), 0) << "payload bit " << bit;
      EXPECT_EQ(code & 0x8000, sign == 0 ? 0 : 0x8000) << "payload bit " << bit;
    }
  }
  EXPECT_GT(format.narrow(std::bit_cast<float>(0x7fffffffu)) & 0x7fff, format.infinity());
}

constexpr Format formats[] = {
    {.name = "f16", .mantissa_bits = 10, .bias = 15, .widen = f16_to_float, .narrow = float_to_f16},
    {.name = "bf16", .mantissa_bits = 7, .bias = 127, .widen = bf16_to_float, .narrow = float_to_bf16}};

INSTANTIATE_TEST_SUITE_P(Formats, HalfTest, testing::ValuesIn(formats),
                         [](const auto& tested) { return tested.param.name; });

TEST(HalfOverflow, F16GoesToInfinityFrom65520On) {
  EXPECT_EQ(float_to_f16(65504.0f), 0x7bff);
  EXPECT_EQ(float_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_f16(-65520.0f), 0xfc00);
  EXPECT_EQ(float_to_f16(std::numeric_limits<float>::max()), 0x7c00);
}

TEST(HalfOverflow, Bf16GoesToInfinityFromHalfAStepPastItsLargestOn) {
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x7f7f7fffu)), 0x7f7f);
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x7f7f8000u)), 0x7f80);
  EXPECT_EQ(float_to_bf16(-std::numeric_limits<float>::max()), 0xff80);
}

TEST(HalfUnderflow, HalfTheSmallestSubnormalTiesToZeroAndMoreDoesNot) {
  EXPECT_EQ(float_to_f16(0x1p-25f), 0);
  EXPECT_EQ(float_to_f16(std::nextafter(0x1p-25f, 1.0f)), 1);
  EXPECT_EQ(float_to_f16(-0x1p-25f), 0x8000);
  EXPECT_EQ(float_to_bf16(0x1p-134f), 0);
  EXPECT_EQ(float_to_bf16(std::nextafter(0x1p-134f, 1.0f)), 1);
}

TEST(HalfTypes, ConvertLikeTheirFunctionsAndInConstantExpressions) {
  static_assert(f16(1.0f).bits == 0x3c00);
  static_assert(static_cast<float>(f16(-2.5f)) == -2.5f);
  static_assert(bf16(1.0f).bits == 0x3f80);
  static_assert(static_cast<float>(bf16(-2.5f)) == -2.5f);
  static_assert(float_to_f16(0x1p-24f) == 1);
  EXPECT_EQ(f16().bits, 0);
  EXPECT_EQ(bf16().bits, 0);
  EXPECT_EQ(sizeof(f16), 2u);
  EXPECT_EQ(sizeof(bf16), 2u);
}

}  // namespace
}  // namespace tilewise
