#include <algorithm>
#include <cmath>
#include <limits>

#include "support/tolerance.h"

namespace tilewise::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double unit_f32 = 0x1p-24;       // half the distance from 1 to the next f32
constexpr double smallest_f32 = 0x1p-126;  // smaller numbers may count as 0
constexpr double function_units = 2;       // what exp, log and tanh may be off: the distance itself

double square(double x) { return x * x; }

// Variance of `count` roundings of x in f32.
double rounded(double x, int count = 1) { return count * square(unit_f32 * x); }

// Variance of storing x in a type.
struct Rounding {
  double relative;
  double absolute;
  explicit Rounding(DType dtype)
      : relative(dtype == DType::f16    ? 0x1p-11
                 : dtype == DType::bf16 ? 0x1p-8
                                        : unit_f32),
        absolute(dtype == DType::f16 ? 0x1p-25 : smallest_f32) {}
  double operator()(double x) const { return square(relative * x) + square(absolute); }
};

// A sum of products in f32: each product is rounded, and so is what has been summed before it. The running
// sums are those of a random walk that ends where the sum does, in whatever order and however many at a time.
struct Sum {
  double value = 0;
  double squares = 0;
  double terms = 0;
  void add(double term) {
    value += term;
    squares += square(term);
    ++terms;
  }
  double variance() const { return square(unit_f32) * (squares + terms / 2 * (squares + square(value))); }
};

// A result that is summed over queries, and the variance its terms bring with them.
struct Total {
  Sum sum;
  double variance = 0;
};

// One query and one key that it sees.
struct Pair {
  std::size_t j = 0;
  double keep = 1;  // dropout's factor
  double score = 0;
  double var_score = 0;
  double slope = 1;  // d score / d product, by softcap
  double var_slope = 0;
  double p = 0;       // weight before dropout
  double ds = 0;      // gradient of the score
  double var_ds = 0;  // without what all keys of the query share
};

class Model {
 public:
  explicit Model(const OpenProblem& open)
      : open_(open),
        dim_qk_(open.dim_qk),
        dim_v_(open.dim_v),
        softcap_(static_cast<double>(open.problem.options.softcap)),
        stored_(open.problem.dtype),
        deviation_(open.problem),
        dk_(deviation_.dk.size()),
        dv_(deviation_.dv.size()),
        dmask_(deviation_.dmask.size()),
        dsinks_(deviation_.dsinks.size()) {
    std::fill(deviation_.lse.begin(), deviation_.lse.end(), 0.0);
  }

  Results run() {
    open_.for_each_head([&](const Head& head) {
      for (std::size_t i = 0; i < head.queries; ++i) {
        scores(head, i);
        if (pairs_.empty() && head.sink == -infinity) continue;
        statistics(head, i);
        output(head, i);
        gradients(head, i);
      }
    });
    finish(deviation_.dk, dk_, stored_);
    finish(deviation_.dv, dv_, stored_);
    finish(deviation_.dmask, dmask_, Rounding(open_.problem.asked.dmask_dtype));
    finish(deviation_.dsinks, dsinks_, Rounding(DType::f32));
    return std::move(deviation_);
  }

 private:
  void scores(const Head& head, std::size_t i) {
    pairs_.clear();
    for (std::size_t j = 0; j < head.keys; ++j) {
      const std::size_t index = head.pair(i, j);
      if (!head.visible[index]) continue;
      Sum product;
      for (std::size_t d = 0; d < dim_qk_; ++d) product.add(open_.scale * head.q[i][d] * head.k[j][d]);
      Pair pair{.j = j, .keep = head.keep[index], .score = product.value};
      // The scale, and the change to the units that exp is taken in.
      pair.var_score = product.variance() + rounded(product.value, 3);
      if (softcap_ > 0) {
        const double t = std::tanh(product.value / softcap_);
        const double var_t =
            square((1 - t * t) / softcap_) * pair.var_score + square(function_units * unit_f32 * t);
        pair.score = softcap_ * t;
        pair.slope = 1 - t * t;
        pair.var_score = square(softcap_) * var_t + rounded(pair.score);
        pair.var_slope = square(2 * t) * var_t + rounded(1, 2);
      }
      for (const double bias : {head.alibi[index], head.mask[index]}) {
        if (bias == 0) continue;
        pair.score += bias;
        pair.var_score += rounded(bias, 2) + rounded(pair.score);
      }
      pairs_.push_back(pair);
    }
  }

  void statistics(const Head& head, std::size_t i) {
    double maximum = head.sink;
    for (const Pair& pair : pairs_) maximum = std::max(maximum, pair.score);
    double sum = std::exp(head.sink - maximum);
    for (const Pair& pair : pairs_) sum += std::exp(pair.score - maximum);
    const double lse = maximum + std::log(sum);
    p_sink_ = std::exp(head.sink - lse);
    var_sink_ = p_sink_ > 0 ? rounded(head.sink, 2) + square(function_units * unit_f32) : 0.0;

    Sum weights;
    weights.add(p_sink_);
    var_lse_ = square(p_sink_) * var_sink_;
    for (Pair& pair : pairs_) {
      pair.p = std::exp(pair.score - lse);
      pair.var_score += rounded(pair.score) + square(function_units * unit_f32);  // exp, of a difference
      var_lse_ += square(pair.p) * pair.var_score;
      weights.add(pair.p);
    }
    var_lse_ += weights.variance() + square(function_units * unit_f32) + rounded(lse, 2);
    deviation_.lse[head.statistic[i]] = std::sqrt(var_lse_);
  }

  void output(const Head& head, std::size_t i) {
    o_.assign(dim_v_, Sum{});
    var_o_.assign(dim_v_, 0.0);
    if (pairs_.empty()) return;
    for (const Pair& pair : pairs_) {
      for (std::size_t d = 0; d < dim_v_; ++d) o_[d].add(pair.p * pair.keep * head.v[pair.j][d]);
    }
    for (const Pair& pair : pairs_) {
      const double var_p = square(pair.p) * pair.var_score;
      const double var_weight = stored_(pair.p * pair.keep);
      for (std::size_t d = 0; d < dim_v_; ++d) {
        const double v = head.v[pair.j][d];
        var_o_[d] += var_p * square(pair.keep * v - o_[d].value) + var_weight * square(v);
      }
    }
    for (std::size_t d = 0; d < dim_v_; ++d) {
      var_o_[d] += o_[d].variance() + rounded(o_[d].value, 2) + stored_(o_[d].value);
      deviation_.o[head.query_row[i] * dim_v_ + d] = std::sqrt(var_o_[d]);
    }
  }

  void gradients(const Head& head, std::size_t i) {
    // What all keys of the query share: d_lse - δ, with δ from o as it was stored.
    Sum delta;
    double var_shift = rounded(head.d_lse[i]);
    for (std::size_t d = 0; d < dim_v_; ++d) {
      delta.add(head.d_o[i][d] * o_[d].value);
      var_shift += square(head.d_o[i][d]) * var_o_[d];
    }
    const double shift = head.d_lse[i] - delta.value;
    var_shift += delta.variance() + rounded(shift);
    if (!dsinks_.empty()) {
      Total& total = dsinks_[head.head];
      total.sum.add(p_sink_ * shift);
      total.variance += square(p_sink_) * (var_shift + (var_lse_ + var_sink_) * square(shift)) +
                        square(smallest_f32 * shift);
    }
    for (Pair& pair : pairs_) {
      Sum dp;
      for (std::size_t d = 0; d < dim_v_; ++d) dp.add(pair.keep * head.d_o[i][d] * head.v[pair.j][d]);
      const double difference = dp.value + shift;
      pair.ds = pair.p * difference;
      pair.var_ds = square(pair.p) * (pair.var_score * square(difference) + dp.variance() +
                                      rounded(dp.value) + rounded(difference, 2)) +
                    square(smallest_f32 * difference);
    }
    value_gradient(head, i);
    mask_gradient(head, i, var_shift);
    product_gradients(head, i, var_shift);
  }

  void value_gradient(const Head& head, std::size_t i) {
    for (const Pair& pair : pairs_) {
      const double weight = pair.p * pair.keep;
      const double var_weight = square(weight) * (pair.var_score + var_lse_) + stored_(weight);
      for (std::size_t d = 0; d < dim_v_; ++d) {
        Total& total = dv_[head.key_row[pair.j] * dim_v_ + d];
        total.sum.add(weight * head.d_o[i][d]);
        total.variance += var_weight * square(head.d_o[i][d]);
      }
    }
  }

  void mask_gradient(const Head& head, std::size_t i, double var_shift) {
    if (head.mask_index.empty()) return;
    // Over neighbouring pairs with one mask element, all of a broadcast row, what they share adds up.
    for (std::size_t n = 0; n < pairs_.size();) {
      const std::size_t element = head.mask_index[head.pair(i, pairs_[n].j)];
      Total& total = dmask_[element];
      double p = 0;
      double ds = 0;
      for (; n < pairs_.size() && head.mask_index[head.pair(i, pairs_[n].j)] == element; ++n) {
        p += pairs_[n].p;
        ds += pairs_[n].ds;
        total.sum.add(pairs_[n].ds);
        total.variance += pairs_[n].var_ds + stored_(pairs_[n].ds);
      }
      total.variance += square(p) * var_shift + square(ds) * var_lse_;
    }
  }

  void product_gradients(const Head& head, std::size_t i, double var_shift) {
    dq_.assign(dim_qk_, Total{});
    shared_.assign(dim_qk_, 0.0);
    const double scale = open_.scale;
    for (const Pair& pair : pairs_) {
      const double ds = pair.ds * pair.slope;
      const double p = pair.p * pair.slope;
      const double var_own =
          pair.var_ds * square(pair.slope) + square(pair.ds) * pair.var_slope + stored_(ds);
      const double var_all = var_own + square(p) * var_shift + square(ds) * var_lse_;
      for (std::size_t d = 0; d < dim_qk_; ++d) {
        const double k = scale * head.k[pair.j][d];
        const double q = scale * head.q[i][d];
        dq_[d].sum.add(ds * k);
        dq_[d].variance += var_own * square(k);
        shared_[d] += p * k;
        Total& dk = dk_[head.key_row[pair.j] * dim_qk_ + d];
        dk.sum.add(ds * q);
        dk.variance += var_all * square(q);
      }
    }
    for (std::size_t d = 0; d < dim_qk_; ++d) {
      dq_[d].variance += square(shared_[d]) * var_shift + square(dq_[d].sum.value) * var_lse_;
      deviation_.dq[head.query_row[i] * dim_qk_ + d] = deviation(dq_[d], stored_);
    }
  }

  // Zero, which is exact, when nothing was summed.
  static double deviation(const Total& total, const Rounding& stored) {
    if (total.sum.terms == 0) return 0;
    const double value = total.sum.value;
    return std::sqrt(total.variance + total.sum.variance() + rounded(value) + stored(value));
  }

  static void finish(std::vector<double>& deviations, const std::vector<Total>& totals,
                     const Rounding& stored) {
    for (std::size_t n = 0; n < totals.size(); ++n) deviations[n] = deviation(totals[n], stored);
  }

  const OpenProblem& open_;
  std::size_t dim_qk_;
  std::size_t dim_v_;
  double softcap_;
  Rounding stored_;
  Results deviation_;
  std::vector<Total> dk_, dv_, dmask_, dsinks_;

  // Of the query.
  std::vector<Pair> pairs_;
  double var_lse_ = 0;
  double p_sink_ = 0;
  double var_sink_ = 0;
  std::vector<Sum> o_;
  std::vector<double> var_o_;
  std::vector<Total> dq_;
  std::vector<double> shared_;  // what a change of shift does to dq
};

}  // namespace

Results rounding_error(const OpenProblem& problem) { return Model(problem).run(); }

}  // namespace tilewise::test
