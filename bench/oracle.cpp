#include "oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/dropout.h"

namespace tilewise::bench {
namespace {

constexpr std::int64_t sampled_queries = 8;
constexpr std::int64_t sampled_keys = 2;

// The index of a sample: `samples` indices are spread evenly over `count`, the first and last included.
std::int64_t spread(std::int64_t sample, std::int64_t samples, std::int64_t count) {
  return (count - 1) * sample / (samples - 1);
}

// A row-major [B, H, S, D] tensor, its rows read as doubles.
struct Rows {
  const Tensor& tensor;
  std::int64_t width() const { return tensor.extent(3); }
  double at(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) const {
    return load(tensor, ((b * tensor.extent(1) + h) * tensor.extent(2) + s) * width() + d);
  }
};

double dot(const Rows& x, std::int64_t x_head, std::int64_t i, const Rows& y, std::int64_t y_head,
           std::int64_t j, std::int64_t b) {
  double sum = 0;
  for (std::int64_t d = 0; d < x.width(); ++d) sum += x.at(b, x_head, i, d) * y.at(b, y_head, j, d);
  return sum;
}

// Attention by its formula in f64, for the heads of one batch entry.
struct Formula {
  const Problem& problem;
  const Operands& operands;
  std::int64_t b;

  Rows q{operands.inputs.q}, k{operands.inputs.k}, v{operands.inputs.v}, o{operands.outputs.o};
  Rows d_o{operands.gradients.d_o}, dq{operands.gradients.dq}, dk{operands.gradients.dk},
      dv{operands.gradients.dv};
  double scale = 1 / std::sqrt(static_cast<double>(problem.shape.d));
  DropoutMask dropout{operands.options.dropout};

  std::int64_t kv_head(std::int64_t h) const { return h / (problem.shape.hq / problem.shape.hkv); }

  double score(std::int64_t h, std::int64_t i, std::int64_t j) const {
    if (!problem.sees(i, j)) return -std::numeric_limits<double>::infinity();
    double s = scale * dot(q, h, i, k, kv_head(h), j, b);
    if (problem.features.mask == MaskKind::additive)
      s += load(operands.inputs.mask, i * problem.shape.sk + j);
    return s;
  }

  // The factor by which dropout multiplies P: 0 or keep_scale.
  double keep(std::int64_t h, std::int64_t i, std::int64_t j) const {
    if (problem.features.dropout == 0) return 1;
    const auto head = static_cast<std::uint32_t>(b * problem.shape.hq + h);
    const bool kept = dropout.keeps(head, static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(j));
    return kept ? static_cast<double>(dropout.keep_scale) : 0;
  }

  // P of query i before dropout; all 0 for an empty row.
  std::vector<double> probabilities(std::int64_t h, std::int64_t i) const {
    std::vector<double> p(static_cast<std::size_t>(problem.shape.sk));
    for (std::size_t j = 0; j < p.size(); ++j) p[j] = score(h, i, static_cast<std::int64_t>(j));
    const double maximum = *std::max_element(p.begin(), p.end());
    double sum = 0;
    for (double& p_j : p) sum += p_j = std::isinf(maximum) ? 0 : std::exp(p_j - maximum);
    for (double& p_j : p) p_j /= sum == 0 ? 1 : sum;
    return p;
  }
};

// Raises `error` to the difference if that is larger. A NaN stays.
void raise_error(double& error, double expected, double actual) {
  const double difference = std::abs(expected - actual);
  if (std::isnan(difference) || difference > error) error = difference;
}

// dS of query i: p_j·(dp_j − delta), with dp_j = keep_j·(dO·v_j) and delta = Σ p·dp.
std::vector<double> ds_of(const Formula& formula, std::int64_t h, std::int64_t i) {
  std::vector<double> ds = formula.probabilities(h, i);
  std::vector<double> dp(ds.size());
  double delta = 0;
  for (std::size_t n = 0; n < ds.size(); ++n) {
    const auto j = static_cast<std::int64_t>(n);
    dp[n] = ds[n] == 0
                ? 0
                : formula.keep(h, i, j) * dot(formula.d_o, h, i, formula.v, formula.kv_head(h), j, formula.b);
    delta += ds[n] * dp[n];
  }
  for (std::size_t n = 0; n < ds.size(); ++n) ds[n] *= dp[n] - delta;
  return ds;
}

// The error of row i of O or dQ, which is a sum over keys.
double query_error(const Formula& formula, std::int64_t h, std::int64_t i) {
  const bool forward = formula.problem.pass == Pass::forward;
  std::vector<double> factors = forward ? formula.probabilities(h, i) : ds_of(formula, h, i);
  for (std::size_t n = 0; n < factors.size(); ++n) {
    factors[n] *= forward ? formula.keep(h, i, static_cast<std::int64_t>(n)) : formula.scale;
  }
  const Rows& keys = forward ? formula.v : formula.k;
  const Rows& actual = forward ? formula.o : formula.dq;
  double error = 0;
  for (std::int64_t d = 0; d < actual.width(); ++d) {
    double expected = 0;
    for (std::size_t n = 0; n < factors.size(); ++n) {
      if (factors[n] == 0) continue;
      expected += factors[n] * keys.at(formula.b, formula.kv_head(h), static_cast<std::int64_t>(n), d);
    }
    raise_error(error, expected, actual.at(formula.b, h, i, d));
  }
  return error;
}

// The error of row j of dK and dV, which are sums over the queries of all heads that share the key. P comes
// from the LSE and delta from the O that backward was given, since computing every softmax again would cost
// as much as attention.
double key_error(const Formula& f, std::int64_t kv_head, std::int64_t j) {
  std::vector<double> dk(static_cast<std::size_t>(f.problem.shape.d));
  std::vector<double> dv(static_cast<std::size_t>(f.problem.shape.dv));
  const std::int64_t group = f.problem.shape.hq / f.problem.shape.hkv;
  for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (std::int64_t i = 0; i < f.problem.shape.sq; ++i) {
      if (!f.problem.sees(i, j)) continue;
      const double lse =
          load(f.operands.outputs.lse, (f.b * f.problem.shape.hq + h) * f.problem.shape.sq + i);
      const double p = std::exp(f.score(h, i, j) - lse);
      const double keep = f.keep(h, i, j);
      const double dp = keep * dot(f.d_o, h, i, f.v, kv_head, j, f.b);
      const double ds = p * (dp - dot(f.d_o, h, i, f.o, h, i, f.b));
      for (std::size_t d = 0; d < dk.size(); ++d)
        dk[d] += f.scale * ds * f.q.at(f.b, h, i, static_cast<std::int64_t>(d));
      for (std::size_t d = 0; d < dv.size(); ++d)
        dv[d] += p * keep * f.d_o.at(f.b, h, i, static_cast<std::int64_t>(d));
    }
  }
  double error = 0;
  for (std::size_t d = 0; d < dk.size(); ++d) {
    raise_error(error, dk[d], f.dk.at(f.b, kv_head, j, static_cast<std::int64_t>(d)));
  }
  for (std::size_t d = 0; d < dv.size(); ++d) {
    raise_error(error, dv[d], f.dv.at(f.b, kv_head, j, static_cast<std::int64_t>(d)));
  }
  return error;
}

}  // namespace

double sampled_error(const Problem& problem, const Operands& operands) {
  const Shape& s = problem.shape;
  double error = 0;
  for (std::int64_t n = 0; n < sampled_queries; ++n) {
    const Formula formula{problem, operands, n % s.b};
    const std::int64_t h = n * 3 % s.hq;
    raise_error(error, 0, query_error(formula, h, spread(n, sampled_queries, s.sq)));
  }
  if (problem.pass == Pass::forward) return error;
  for (std::int64_t n = 0; n < sampled_keys; ++n) {
    const Formula formula{problem, operands, n % s.b};
    raise_error(error, 0, key_error(formula, n % s.hkv, spread(n, sampled_keys, s.sk)));
  }
  return error;
}

}  // namespace tilewise::bench
