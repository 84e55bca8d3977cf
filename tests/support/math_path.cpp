#include "support/math_path.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "tilewise/half.h"

namespace tilewise::test {
namespace {

// The largest number of products that are summed one after another. Longer sums are divided into runs of
// equal length, as in PyTorch's sgemm (MKL): with this number, errors agree with those of PyTorch to 1 % for
// K from 4 to 4096.
constexpr std::size_t max_run = 192;

std::size_t run_length(std::size_t terms) {
  const std::size_t runs = std::max<std::size_t>(1, (terms + max_run - 1) / max_run);
  return std::max<std::size_t>(1, (terms + runs - 1) / runs);
}

float rounded(float value, DType dtype) {
  switch (dtype) {
    case DType::f16: return static_cast<float>(f16(value));
    case DType::bf16: return static_cast<float>(bf16(value));
    default: return value;
  }
}

// The factors of q and of k, whose product is the scale.
struct Scales {
  double q, k;
};
Scales square_roots(double scale) {
  const double root = std::sqrt(std::abs(scale));
  return {.q = scale < 0 ? -root : root, .k = root};
}

template <typename Real>
class MathPath {
 public:
  // `product_dtype` is the type to which results of matrix products are rounded, and P, which is an operand
  // of one.
  MathPath(const OpenProblem& open, Scales scales, DType product_dtype)
      : open_(open),
        dim_qk_(open.dim_qk),
        dim_v_(open.dim_v),
        softcap_(static_cast<Real>(open.problem.options.softcap)),
        scale_k_(static_cast<Real>(scales.k)),
        scale_q_(static_cast<Real>(scales.q)),
        product_dtype_(product_dtype),
        results_(open.problem) {}

  Results run() {
    open_.for_each_head([&](const Head& head) { attend(head); });
    return std::move(results_);
  }

 private:
  using Matrix = std::vector<Real>;

  // Rounds to the type of products.
  Real narrow(Real value) const {
    if constexpr (std::is_same_v<Real, float>) return rounded(value, product_dtype_);
    return value;
  }

  bool scales_by_head() const { return open_.problem.logit_scale.given(); }

  // a·b + c with one rounding.
  static Real multiply_add(Real a, Real b, Real c) {
    return static_cast<Real>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
  }

  // Rows to which products are added, in runs.
  struct RowSums {
    Matrix total, partial;
    std::size_t run, terms = 0;

    RowSums(std::size_t size, std::size_t run_) : total(size), partial(size), run(run_) {}

    void add(std::size_t at, Real factor, const Real* row, std::size_t dim) {
      if (factor == 0) return;  // hidden or dropped
      for (std::size_t d = 0; d < dim; ++d) partial[at + d] = multiply_add(factor, row[d], partial[at + d]);
    }
    void end_term() {
      if (++terms % run == 0) flush();
    }
    void flush() {
      for (std::size_t n = 0; n < total.size(); ++n) total[n] += std::exchange(partial[n], Real{0});
    }
  };

  // A sum in the order of vectorised code: one per lane, then lanes are added in pairs.
  template <std::size_t count>
  class LaneSum {
   public:
    void add(Real a, Real b) {
      Real& lane = lanes_[terms_++ % count];
      lane = multiply_add(a, b, lane);
    }
    Real value() const {
      std::array<Real, count> values = lanes_;
      for (std::size_t half = values.size() / 2; half > 0; half /= 2) {
        for (std::size_t n = 0; n < half; ++n) values[n] += values[n + half];
      }
      return values[0];
    }

   private:
    std::array<Real, count> lanes_{};
    std::size_t terms_ = 0;
  };

  Matrix scaled(const std::vector<const double*>& rows, std::size_t dim, Real factor) const {
    Matrix result;
    for (const double* row : rows) {
      for (std::size_t d = 0; d < dim; ++d) result.push_back(narrow(static_cast<Real>(row[d]) * factor));
    }
    return result;
  }

  Real dot(const Real* a, const Real* b, std::size_t dim) const {
    if (one_query_) {  // a product with a vector: four lanes
      LaneSum<4> sum;
      for (std::size_t d = 0; d < dim; ++d) sum.add(a[d], b[d]);
      return sum.value();
    }
    const std::size_t run = run_length(dim);
    Real sum = 0;
    for (std::size_t first = 0; first < dim; first += run) {
      Real partial = 0;
      for (std::size_t d = first; d < std::min(dim, first + run); ++d) {
        partial = multiply_add(a[d], b[d], partial);
      }
      sum += partial;
    }
    return sum;
  }

  // The dot products of a with all rows, which `transposed` has as [dim, rows], too. Each sum is a chain of
  // dependent additions, so sixteen sums are computed together.
  void dots(const Real* a, const Matrix& rows, const Matrix& transposed, std::size_t dim,
            Matrix& results) const {
    constexpr std::size_t together = 16;
    const std::size_t count = results.size();
    const std::size_t run = run_length(dim);
    std::size_t row = 0;
    for (; !one_query_ && row + together <= count; row += together) {
      std::array<Real, together> sums{};
      for (std::size_t first = 0; first < dim; first += run) {
        std::array<Real, together> partials{};
        for (std::size_t d = first; d < std::min(dim, first + run); ++d) {
          const Real* column = &transposed[d * count + row];
          for (std::size_t n = 0; n < together; ++n) partials[n] = multiply_add(a[d], column[n], partials[n]);
        }
        for (std::size_t n = 0; n < together; ++n) sums[n] += partials[n];
      }
      std::copy(sums.begin(), sums.end(), &results[row]);
    }
    for (; row < count; ++row) results[row] = dot(a, &rows[row * dim], dim);
  }

  static Matrix transposed(const Matrix& rows, std::size_t dim) {
    Matrix result(rows.size());
    const std::size_t count = rows.size() / dim;
    for (std::size_t row = 0; row < count; ++row) {
      for (std::size_t d = 0; d < dim; ++d) result[d * count + row] = rows[row * dim + d];
    }
    return result;
  }

  void attend(const Head& head) {
    one_query_ = head.queries == 1;
    key_run_ = one_query_ ? head.keys + 1 : run_length(head.keys);
    q_ = scaled(head.q, dim_qk_, scale_q_);
    k_ = scaled(head.k, dim_qk_, scale_k_);
    v_ = scaled(head.v, dim_v_, 1);
    k_transposed_ = transposed(k_, dim_qk_);
    v_transposed_ = transposed(v_, dim_v_);
    d_o_ = scaled(head.d_o, dim_v_, 1);
    RowSums dk(k_.size(), run_length(head.queries));
    RowSums dv(v_.size(), run_length(head.queries));
    for (std::size_t i = 0; i < head.queries; ++i) {
      if (!softmax(head, i)) continue;
      forward(head, i);
      if (!open_.problem.asked.backward) continue;
      backward(head, i, dk, dv);
      dk.end_term();
      dv.end_term();
    }
    dk.flush();
    dv.flush();
    // dK and dV are the sums over the query heads that share the key head. In PyTorch each of them is a
    // tensor.
    const auto add = [](double& sum, Real value) {
      sum = static_cast<double>(static_cast<Real>(sum) + value);
    };
    for (std::size_t j = 0; j < head.keys; ++j) {
      for (std::size_t d = 0; d < dim_qk_; ++d)
        add(results_.dk[head.key_row[j] * dim_qk_ + d], narrow(dk.total[j * dim_qk_ + d]) * scale_k_);
      for (std::size_t d = 0; d < dim_v_; ++d)
        add(results_.dv[head.key_row[j] * dim_v_ + d], narrow(dv.total[j * dim_v_ + d]));
    }
  }

  // Computes P of query i. Returns false for an empty row.
  bool softmax(const Head& head, std::size_t i) {
    constexpr Real hidden = -std::numeric_limits<Real>::infinity();
    p_.assign(head.keys, hidden);
    softcap_derivative_.assign(head.keys, 1);
    const auto sink = static_cast<Real>(head.sink);
    Real maximum = sink;
    qk_.resize(head.keys);
    dots(&q_[i * dim_qk_], k_, k_transposed_, dim_qk_, qk_);
    for (std::size_t j = 0; j < head.keys; ++j) {
      const std::size_t pair = head.pair(i, j);
      if (!head.visible[pair]) continue;
      Real s = qk_[j] = narrow(qk_[j]);
      if (scales_by_head()) s = narrow(s * static_cast<Real>(head.logit_scale));
      if (softcap_ > 0) {
        const Real t = std::tanh(s / softcap_);
        s = softcap_ * t;
        softcap_derivative_[j] = 1 - t * t;
      }
      if (open_.problem.alibi_slopes.given()) s += static_cast<Real>(head.alibi[pair]);
      if (!head.mask_index.empty()) s += static_cast<Real>(head.mask[pair]);
      p_[j] = s;
      maximum = std::max(maximum, s);
    }
    if (maximum == hidden) return false;
    LaneSum<16> exp_sum;
    for (Real& p : p_) {
      p = std::exp(p - maximum);
      exp_sum.add(p, 1);
    }
    const Real sum = exp_sum.value() + std::exp(sink - maximum);
    for (Real& p : p_) p /= sum;
    p_sink_ = std::exp(sink - maximum) / sum;
    results_.lse[head.statistic[i]] = static_cast<double>(maximum + std::log(sum));
    return true;
  }

  Real p_after_dropout(const Head& head, std::size_t i, std::size_t j) const {
    return narrow(p_[j] * static_cast<Real>(head.keep_at(head.pair(i, j))));
  }

  void forward(const Head& head, std::size_t i) {
    RowSums o(dim_v_, key_run_);
    for (std::size_t j = 0; j < head.keys; ++j) {
      o.add(0, p_after_dropout(head, i, j), &v_[j * dim_v_], dim_v_);
      o.end_term();
    }
    o.flush();
    std::copy(o.total.begin(), o.total.end(), &results_.o[head.query_row[i] * dim_v_]);
  }

  void backward(const Head& head, std::size_t i, RowSums& dk, RowSums& dv) {
    dp_.resize(head.keys);
    dots(&d_o_[i * dim_v_], v_, v_transposed_, dim_v_, dp_);
    LaneSum<16> delta;
    for (std::size_t j = 0; j < head.keys; ++j) {
      dp_[j] = narrow(narrow(dp_[j]) * static_cast<Real>(head.keep_at(head.pair(i, j))));
      delta.add(p_[j], dp_[j]);
      dv.add(j * dim_v_, p_after_dropout(head, i, j), &d_o_[i * dim_v_], dim_v_);
    }
    const Real dlse_minus_delta = static_cast<Real>(head.d_lse[i]) - delta.value();
    RowSums dq(dim_qk_, key_run_);
    for (std::size_t j = 0; j < head.keys; ++j) {
      const Real ds = narrow(p_[j] * (dp_[j] + dlse_minus_delta));
      // PyTorch sums one tensor by cascade summation, whose error is negligible, so this sum is f64.
      if (!head.mask_index.empty())
        results_.dmask[head.mask_index[head.pair(i, j)]] += static_cast<double>(ds);
      Real d_qk = narrow(ds * softcap_derivative_[j]);
      if (scales_by_head() && head.visible[head.pair(i, j)]) {
        results_.dlogit_scale[head.head] += static_cast<double>(d_qk) * static_cast<double>(qk_[j]);
        d_qk = narrow(d_qk * static_cast<Real>(head.logit_scale));
      }
      dq.add(0, d_qk, &k_[j * dim_qk_], dim_qk_);
      dq.end_term();
      dk.add(j * dim_qk_, d_qk, &q_[i * dim_qk_], dim_qk_);
    }
    dq.flush();
    for (std::size_t d = 0; d < dim_qk_; ++d) {
      results_.dq[head.query_row[i] * dim_qk_ + d] = static_cast<double>(narrow(dq.total[d]) * scale_q_);
    }
    if (open_.problem.sinks.given())
      results_.dsinks[head.head] += static_cast<double>(p_sink_ * dlse_minus_delta);
  }

  const OpenProblem& open_;
  std::size_t dim_qk_;
  std::size_t dim_v_;
  Real softcap_;
  Real scale_k_;
  Real scale_q_;
  DType product_dtype_;
  Results results_;

  bool one_query_ = false;                   // matrix products are then matrix-vector products
  std::size_t key_run_ = 0;                  // run length of sums over keys
  Matrix q_, k_, v_, d_o_;                   // of the current head
  Matrix k_transposed_, v_transposed_;       // the same, [dim, keys]
  Matrix qk_, p_, softcap_derivative_, dp_;  // of the current query
  Real p_sink_ = 0;
};

void round_to(DType dtype, std::vector<double>& values) {
  for (double& value : values) value = static_cast<double>(rounded(static_cast<float>(value), dtype));
}

Results run_in_f32(const OpenProblem& open, Scales scales, DType product_dtype) {
  Results results = MathPath<float>(open, scales, product_dtype).run();
  for (std::vector<double>* rows : {&results.o, &results.dq, &results.dk, &results.dv})
    round_to(open.problem.dtype, *rows);
  round_to(open.problem.asked.dmask_dtype, results.dmask);
  round_to(DType::f32, results.dsinks);
  round_to(DType::f32, results.dlogit_scale);
  return results;
}

}  // namespace

Results math_path(const OpenProblem& open) { return run_in_f32(open, square_roots(open.scale), DType::f32); }

Results half_path(const OpenProblem& open) {
  const DType dtype = open.problem.dtype;
  if (dtype == DType::f32) return math_path(open);
  return run_in_f32(open, {.q = open.scale, .k = 1}, dtype);
}

Results formula(const OpenProblem& open) {
  return MathPath<double>(open, square_roots(open.scale), DType::f64).run();
}

}  // namespace tilewise::test
