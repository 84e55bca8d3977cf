#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "support/buffer.h"
#include "support/random.h"
#include "tilewise/tilewise.h"

namespace tilewise::test {

// Operations as a framework makes them one by one: sums in f32, every result rounded to the type. A kernel
// may be off the truth by twice what this is off.

/// Random numbers whose seed stands in the message of every failure while they live.
struct SeededRandom : Random {
  explicit SeededRandom(std::uint64_t seed, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : Random(seed), trace(file, line, "seed " + std::to_string(seed)) {}
  testing::ScopedTrace trace;
};

inline double rounded_to(DType dtype, double value) {
  switch (dtype) {
    case DType::f16: return static_cast<double>(f16_to_float(float_to_f16(static_cast<float>(value))));
    case DType::bf16: return static_cast<double>(bf16_to_float(float_to_bf16(static_cast<float>(value))));
    case DType::f32: return static_cast<double>(static_cast<float>(value));
    default: return value;
  }
}

/// A matrix of values of a type.
struct Plain {
  DType dtype = DType::f32;
  std::int64_t rows = 0, columns = 0;
  std::vector<double> values;

  Plain(DType type, std::int64_t r, std::int64_t c)
      : dtype(type), rows(r), columns(c), values(static_cast<std::size_t>(r * c)) {}
  /// Vectors are one row.
  explicit Plain(const Buffer& buffer)
      : dtype(buffer.dtype()),
        rows(buffer.shape().size() == 2 ? buffer.extent(0) : 1),
        columns(buffer.shape().back()),
        values(buffer.values()) {}

  double& at(std::int64_t r, std::int64_t c) { return values[static_cast<std::size_t>(r * columns + c)]; }
  double at(std::int64_t r, std::int64_t c) const {
    return values[static_cast<std::size_t>(r * columns + c)];
  }

  template <typename Value>
  static Plain of(DType dtype, std::int64_t rows, std::int64_t columns, const Value& value) {
    Plain result(dtype, rows, columns);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) result.at(r, c) = rounded_to(dtype, value(r, c));
    }
    return result;
  }
  Plain transposed() const {
    return of(dtype, columns, rows, [&](std::int64_t r, std::int64_t c) { return at(c, r); });
  }
};

/// a·bᵀ + bias.
inline Plain plain_linear(const Plain& a, const Plain& b, const Buffer& bias, DType dtype) {
  return Plain::of(dtype, a.rows, b.rows, [&](std::int64_t m, std::int64_t n) {
    float sum = 0;
    for (std::int64_t k = 0; k < a.columns; ++k) {
      sum = std::fma(static_cast<float>(a.at(m, k)), static_cast<float>(b.at(n, k)), sum);
    }
    return static_cast<double>(sum + static_cast<float>(bias.given() ? bias.at(n) : 0));
  });
}

template <typename Value>
Plain plain_map(const Plain& a, const Value& value) {
  return Plain::of(a.dtype, a.rows, a.columns,
                   [&](std::int64_t r, std::int64_t c) { return value(a.at(r, c), r, c); });
}

/// The activation, computed in f32.
inline double plain_activated(Activation activation, double value) {
  const auto x = static_cast<float>(value);
  float y = x;
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: y = std::max(x, 0.0f); break;
    case Activation::gelu: y = 0.5f * x * (1 + std::erf(x * 0.70710678f)); break;
    case Activation::gelu_tanh:
      y = 0.5f * x * (1 + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
      break;
    case Activation::silu: y = x / (1 + std::exp(-x)); break;
  }
  return static_cast<double>(y);
}

/// Half the distance between a value and the next one of the type.
inline double half_unit(double value, DType dtype) {
  if (value == 0 || !std::isfinite(value)) return 0;
  const int digits = dtype == DType::f16 ? 11 : dtype == DType::bf16 ? 8 : dtype == DType::f32 ? 24 : 53;
  const int lowest = dtype == DType::f16 ? -14 : -126;
  return std::ldexp(1.0, std::max(std::ilogb(value), lowest) - digits);
}

/// Expects `got` to be as near to the truth as the contract says: at most twice as far off as `plain`, for
/// the largest error and for the norm of all. Plain may be right by luck where elements are few: a result may
/// always be off by the four roundings on its way in f32, and by a unit in the last place in narrower types,
/// of the largest number there or of `terms`, the size of what is summed up.
inline void expect_near(const Buffer& got, const std::vector<double>& truth, const Plain& plain,
                        const std::string& name, double terms = 0) {
  ASSERT_EQ(static_cast<std::size_t>(got.size()), truth.size()) << name;
  ASSERT_EQ(plain.values.size(), truth.size()) << name;
  const std::vector<double> values = got.values();
  double largest = 0, largest_plain = 0, squares = 0, squares_plain = 0, size = terms;
  for (std::size_t n = 0; n < truth.size(); ++n) {
    const double error = std::abs(values[n] - truth[n]);
    ASSERT_FALSE(std::isnan(error)) << name << " element " << n << ": got " << values[n] << ", expected "
                                    << truth[n];
    largest = std::max(largest, error);
    squares += error * error;
    const double error_plain = std::abs(plain.values[n] - truth[n]);
    largest_plain = std::max(largest_plain, error_plain);
    squares_plain += error_plain * error_plain;
    size = std::max(size, std::abs(truth[n]));
  }
  const double least = (got.dtype() == DType::f32 ? 4 : 2) * half_unit(size, got.dtype());
  const double root = std::sqrt(static_cast<double>(truth.size()));
  EXPECT_LE(largest, std::max(2 * largest_plain, least)) << name;
  EXPECT_LE(std::sqrt(squares), std::max(2 * std::sqrt(squares_plain), least * root)) << name;
  EXPECT_TRUE(got.guards_intact()) << name;
}

/// The same values in f64.
inline Buffer exact(const Buffer& buffer) {
  if (!buffer.given()) return {};
  Buffer result(DType::f64, buffer.shape());
  result.set_values(buffer.values());
  return result;
}

inline Buffer random_buffer(Random& random, DType dtype, Shape shape, double deviation = 1,
                            const Placement& placement = {}) {
  Buffer buffer(dtype, std::move(shape), placement);
  buffer.fill_random(random, deviation);
  return buffer;
}

/// A matrix by rows or by columns, with or without gaps, aligned or not.
inline Placement random_placement(Random& random, bool by_columns = false) {
  Placement placement;
  if (by_columns) placement.order = {1, 0};
  if (random.chance(0.4))
    placement.padding = by_columns ? Shape{random.between(1, 9)} : Shape{0, random.between(1, 9)};
  placement.lead = random.chance(0.3) ? random.between(1, 5) : 0;
  return placement;
}

/// One thread: the calls are small.
inline Context serial_context() { return {.parallel_for = serial_parallel_for()}; }

/// A context for a kernel of the CPU: random threads and SIMD level.
inline Context random_context(Random& random) {
  const std::vector<std::string_view> levels = simd_levels();
  const auto level =
      static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(levels.size()) - 1));
  return {.parallel_for = random.chance(0.5) ? serial_parallel_for() : openmp_parallel_for(2),
          .simd_level = levels[level]};
}

/// How a call is made on a device whose memory is not the host's: tensors are moved there and back. Tests of
/// such devices set it.
using DeviceCall = std::function<void(const Context& context, const std::vector<Tensor*>& tensors,
                                      const std::function<std::size_t(const Context&)>& workspace,
                                      const std::function<void(const Context&)>& call)>;
inline DeviceCall device_call;

/// Makes a call with the workspace it asks for, its tensors being where the context's device reads them.
inline void call_on(Context context, const std::vector<Tensor*>& tensors,
                    const std::function<std::size_t(const Context&)>& workspace,
                    const std::function<void(const Context&)>& call) {
  if (context.device.type != Device::Type::cpu) return device_call(context, tensors, workspace, call);
  with_workspace(workspace(context), [&](Workspace given) {
    context.workspace = given;
    call(context);
  });
}

/// The message of what `body` throws, which must be of that type.
template <typename Exception, typename Body>
std::string thrown(const Body& body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace tilewise::test
