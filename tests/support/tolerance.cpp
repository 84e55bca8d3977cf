#include "support/tolerance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "support/math_path.h"
#include "tilewise/context.h"

namespace tilewise::test {
namespace {

constexpr double contract_factor = 2;
// Suppose that a tensor's error comes from one or two roundings, and that a kernel has twice as many of them
// as the path, which the contract allows. With normally distributed errors, the kernel's error exceeds twice
// the worst of n draws with a probability of about 1e-3 for n = 64 and 1e-5 for n = 1024. A run has about 1e4
// such tensors.
constexpr int few_draws = 64;
constexpr int most_draws = 1024;
// A large tensor has enough errors in a few draws, and each of its draws takes long.
constexpr std::size_t many_errors = std::size_t{1} << 24;

int most_draws_of(std::size_t elements) {
  const std::size_t enough = many_errors / std::max<std::size_t>(elements, 1);
  return static_cast<int>(std::clamp<std::size_t>(enough, few_draws, most_draws));
}

// An error that exceeds the bound by this factor after few_draws is not bad luck.
constexpr double hopeless = 4;

// The truth is rounded, too: this is its error relative to the size of its terms.
constexpr double truth_unit = 0x1p-53;

double largest_finite(DType dtype) {
  switch (dtype) {
    case DType::f16: return 65504;
    case DType::bf16: return 0x1.FEp127;
    default: return 0x1.FFFFFEp127;
  }
}

// Half the distance from a value to the next one of the type.
double half_unit(double value, DType dtype) {
  if (!std::isfinite(value)) return 0;
  const int digits = dtype == DType::f16 ? 11 : dtype == DType::bf16 ? 8 : 24;
  const int lowest = dtype == DType::f16 ? -14 : -126;
  const int exponent = value == 0 ? lowest : std::max(std::ilogb(value), lowest);
  return value == 0 ? 0 : std::ldexp(1.0, exponent - digits);
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

// The distance from the truth. 0 if both are the same infinity, or if `got` overflowed where the truth is at
// the end of the range of the type.
double error_of(double got, double truth, double allowed, double largest) {
  if (got == truth) return 0;
  const bool overflows = std::isinf(got) && got * truth > 0 && std::abs(truth) + allowed > largest;
  return overflows ? 0 : std::abs(got - truth);
}

double largest_of(const std::vector<const double*>& rows, std::size_t dim) {
  double largest = 0;
  for (const double* row : rows) {
    for (std::size_t d = 0; d < dim; ++d) largest = std::max(largest, std::abs(row[d]));
  }
  return largest;
}

}  // namespace

MathPathErrors::MathPathErrors(const OpenProblem& open, const Results& truth, int threads, Rule rule)
    : open_(open), threads_(threads), rule_(rule), worst_(draw(open, truth)) {}

MathPathErrors::ByResult MathPathErrors::draw(const OpenProblem& open, const Results& truth) const {
  const Results math = rule_ == Rule::strict ? math_path(open) : half_path(open);
  ByResult errors;
  for (std::size_t which = 0; which < errors.size(); ++which) {
    const std::vector<double>& exact = truth.*Results::members[which];
    const std::vector<double>& values = math.*Results::members[which];
    double largest = 0;
    double squares = 0;
    for (std::size_t n = 0; n < exact.size(); ++n) {
      const double error = std::abs(values[n] - exact[n]);
      if (!std::isfinite(error)) continue;
      largest = std::max(largest, error);
      squares += error * error;
    }
    errors[which] = {.largest = largest, .norm = std::sqrt(squares)};
  }
  return errors;
}

const Errors& MathPathErrors::of(std::vector<double> Results::* result) const {
  const auto at = std::find(Results::members.begin(), Results::members.end(), result);
  return worst_[static_cast<std::size_t>(at - Results::members.begin())];
}

void MathPathErrors::draw_more() {
  std::vector<ByResult> drawn(static_cast<std::size_t>(draws_));
  openmp_parallel_for(threads_).run(draws_, [&](std::int64_t n) {
    const OpenProblem neighbour = open_.neighbour(static_cast<std::uint64_t>(draws_ + n));
    drawn[static_cast<std::size_t>(n)] = draw(neighbour, formula(neighbour));
  });
  for (const ByResult& errors : drawn) {
    for (std::size_t which = 0; which < worst_.size(); ++which) {
      worst_[which].largest = std::max(worst_[which].largest, errors[which].largest);
      worst_[which].norm = std::max(worst_[which].norm, errors[which].norm);
    }
  }
  draws_ *= 2;
}

std::string MathPathErrors::mismatch(const Expectation& expectation, std::vector<double> Results::* result,
                                     const Buffer& got) {
  const int most = most_draws_of(expectation.truth.size());
  while (true) {
    Errors allowed = allowed_errors(expectation, of(result), got.dtype());
    std::string text = test::mismatch(expectation, allowed, got);
    if (text.empty() || draws_ >= most) return text;
    allowed.largest *= hopeless;
    allowed.norm *= hopeless;
    if (draws_ >= few_draws && !test::mismatch(expectation, allowed, got).empty()) return text;
    draw_more();
  }
}

Results term_sizes(const OpenProblem& open) {
  Results sizes(open.problem);
  std::fill(sizes.lse.begin(), sizes.lse.end(), 0.0);
  open.for_each_head([&](const Head& head) {
    const double scale = std::abs(open.scale * head.logit_scale);
    const double q = largest_of(head.q, open.dim_qk) * std::abs(open.scale);
    const double k = largest_of(head.k, open.dim_qk);
    const double v = largest_of(head.v, open.dim_v);
    const double d_o = largest_of(head.d_o, open.dim_v);
    const double keep = 1 / (1 - static_cast<double>(open.problem.options.dropout.probability));
    const double dp = 2 * keep * static_cast<double>(open.dim_v) * d_o * v;
    const auto queries = static_cast<double>(head.queries);
    double d_lse = 0;
    for (const double value : head.d_lse) d_lse = std::max(d_lse, std::abs(value));
    const auto fill = [](std::vector<double>& to, std::size_t row, std::size_t dim, double size) {
      for (std::size_t d = 0; d < dim; ++d) to[row * dim + d] += size;
    };
    std::vector<char> key_seen(head.keys);
    for (std::size_t i = 0; i < head.queries; ++i) {
      bool sees = false;
      double bias = 0;
      for (std::size_t j = 0; j < head.keys; ++j) {
        const std::size_t pair = head.pair(i, j);
        if (!head.visible[pair]) continue;
        sees = true;
        key_seen[j] = true;
        bias = std::max(bias, std::abs(head.alibi_at(pair)) + std::abs(head.mask_at(pair)));
      }
      const bool sink = std::isfinite(head.sink);
      if (sees || sink)
        sizes.lse[head.statistic[i]] = 1 + bias +
                                       static_cast<double>(open.dim_qk) * q * k * std::abs(head.logit_scale) +
                                       std::abs(sink ? head.sink : 0);
      if (sink && !sizes.dsinks.empty()) sizes.dsinks[head.head] += dp + d_lse;
      if (!sees) continue;
      fill(sizes.o, head.query_row[i], open.dim_v, keep * v);
      fill(sizes.dq, head.query_row[i], open.dim_qk, (dp + d_lse) * k * scale);
      if (!sizes.dlogit_scale.empty())
        sizes.dlogit_scale[head.head] += (dp + d_lse) * static_cast<double>(open.dim_qk) * q * k;
      for (std::size_t j = 0; j < head.keys && !head.mask_index.empty(); ++j) {
        if (head.visible[head.pair(i, j)]) sizes.dmask[head.mask_index[head.pair(i, j)]] += dp + d_lse;
      }
    }
    for (std::size_t j = 0; j < head.keys; ++j) {
      if (!key_seen[j]) continue;
      fill(sizes.dk, head.key_row[j], open.dim_qk, queries * (dp + d_lse) * q * std::abs(head.logit_scale));
      fill(sizes.dv, head.key_row[j], open.dim_v, queries * keep * d_o);
    }
  });
  return sizes;
}

Errors allowed_errors(const Expectation& expectation, const Errors& math, DType dtype) {
  double largest = 0;
  double squares = 0;
  for (std::size_t n = 0; n < expectation.truth.size(); ++n) {
    const double least = half_unit(expectation.truth[n], dtype) + truth_unit * expectation.sizes[n];
    largest = std::max(largest, least);
    squares += least * least;
  }
  return {.largest = std::max(contract_factor * math.largest, largest),
          .norm = std::max(contract_factor * math.norm, std::sqrt(squares))};
}

std::string mismatch(const Expectation& expectation, const Errors& allowed, const Buffer& got) {
  const std::vector<double> values = got.values();
  const double end = largest_finite(got.dtype());
  std::ostringstream text;
  text.precision(9);
  std::size_t worst = 0;
  double worst_excess = 0;
  std::size_t wrong = 0;
  double squares = 0;
  for (std::size_t n = 0; n < values.size(); ++n) {
    const double bound = expectation.sizes[n] == 0 ? 0 : allowed.largest;
    const double error = error_of(values[n], expectation.truth[n], bound, end);
    squares += error * error;
    if (error <= bound) continue;
    ++wrong;
    // NaN is worse than any number.
    const double excess = std::isnan(error) ? HUGE_VAL : error - bound;
    if (excess > worst_excess || wrong == 1) {
      worst = n;
      worst_excess = excess;
    }
  }
  if (wrong > 0) {
    text << expectation.name << index_text(got.shape(), worst) << ": got " << values[worst] << ", expected "
         << expectation.truth[worst] << " within " << (expectation.sizes[worst] == 0 ? 0 : allowed.largest)
         << ", is off by " << std::abs(values[worst] - expectation.truth[worst]) << "; " << wrong << " of "
         << values.size() << " elements are wrong";
  } else if (std::sqrt(squares) > allowed.norm) {
    text << expectation.name << ": the norm of all errors is " << std::sqrt(squares) << ", expected at most "
         << allowed.norm;
  }
  return text.str();
}

}  // namespace tilewise::test
