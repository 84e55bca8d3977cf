#include "support/tolerance.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace tilewise::test {
namespace {

// Of the math path's error: the contract.
constexpr double contract_factor = 2;
// Of the model's deviation. Its roundings are as large as they can be, which a rounding on average is not by
// a factor of 2.4; so these are seven true deviations, beyond which there is nothing in a test's 10^9
// elements.
constexpr double deviations = 3;

double largest_finite(DType dtype) {
  switch (dtype) {
    case DType::f16: return 65504;
    case DType::bf16: return 0x1.FEp127;
    default: return 0x1.FFFFFEp127;
  }
}

double norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

std::string index_text(const Shape& shape, std::size_t element) {
  std::string text;
  auto rest = static_cast<std::int64_t>(element);
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    text = std::to_string(rest % shape[dim]) + (text.empty() ? "" : ", ") + text;
    rest /= shape[dim];
  }
  return "[" + text + "]";
}

// Distance from the truth; none where both are the same infinity, or `got` is where the type ends.
double error_of(double got, double truth, double allowed, double largest) {
  if (got == truth) return 0;
  const bool overflows = std::isinf(got) && got * truth > 0 && std::abs(truth) + allowed > largest;
  return overflows ? 0 : std::abs(got - truth);
}

}  // namespace

Expectation expect_like_math_path(std::string name, const std::vector<double>& truth,
                                  const std::vector<double>& math_path, const std::vector<double>& rounding) {
  double worst = 0;
  double squares = 0;
  for (std::size_t n = 0; n < truth.size(); ++n) {
    const double error = std::abs(math_path[n] - truth[n]);
    if (!std::isfinite(error)) continue;
    worst = std::max(worst, error);
    squares += error * error;
  }
  Expectation expectation{
      std::move(name), truth, {}, contract_factor * (std::sqrt(squares) + norm(rounding))};
  for (const double deviation : rounding) {
    expectation.allowed.push_back(deviation == 0 ? 0 : contract_factor * worst + deviations * deviation);
  }
  return expectation;
}

Expectation expect_statistics(std::string name, const std::vector<double>& truth,
                              const std::vector<double>& rounding) {
  Expectation expectation{std::move(name), truth, {}, deviations * norm(rounding)};
  for (const double deviation : rounding) expectation.allowed.push_back(deviations * deviation);
  return expectation;
}

std::string mismatch(const Expectation& expectation, const Buffer& got) {
  const std::vector<double> values = got.values();
  const double largest = largest_finite(got.dtype());
  std::ostringstream text;
  text.precision(9);
  std::size_t worst = 0;
  double worst_excess = 0;
  std::size_t wrong = 0;
  double squares = 0;
  for (std::size_t n = 0; n < values.size(); ++n) {
    const double error = error_of(values[n], expectation.truth[n], expectation.allowed[n], largest);
    squares += error * error;
    if (error <= expectation.allowed[n]) continue;
    ++wrong;
    // Not a number is worse than any number.
    const double excess = std::isnan(error) ? HUGE_VAL : error - expectation.allowed[n];
    if (excess > worst_excess || wrong == 1) {
      worst = n;
      worst_excess = excess;
    }
  }
  if (wrong > 0) {
    text << expectation.name << index_text(got.shape(), worst) << ": got " << values[worst] << ", expected "
         << expectation.truth[worst] << " within " << expectation.allowed[worst] << "; " << wrong << " of "
         << values.size() << " elements are wrong";
  } else if (std::sqrt(squares) > expectation.allowed_norm) {
    text << expectation.name << ": the norm of all errors is " << std::sqrt(squares) << ", expected at most "
         << expectation.allowed_norm << " (norm of the truth: " << norm(expectation.truth) << ")";
  }
  return text.str();
}

}  // namespace tilewise::test
