#include "support/math_path.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "tilewise/half.h"

namespace tilewise::test {
namespace {

// Real is what is computed in, Stored what intermediate tensors hold.
template <typename Real, typename Stored>
class MathPath {
 public:
  explicit MathPath(const OpenProblem& open)
      : open_(open),
        dim_qk_(open.dim_qk),
        dim_v_(open.dim_v),
        softcap_(static_cast<Real>(open.problem.options.softcap)),
        scale_k_(static_cast<Real>(std::sqrt(std::abs(open.scale)))),
        scale_q_(open.scale < 0 ? -scale_k_ : scale_k_),
        results_(open.problem) {}

  Results run() {
    open_.for_each_head([&](const Head& head) { attend(head); });
    round_all(results_.dk);
    round_all(results_.dv);
    if (open_.problem.mask.given() && open_.problem.mask.dtype() != DType::f32) round_all(results_.dmask);
    return std::move(results_);
  }

 private:
  using Matrix = std::vector<Real>;

  static Real rounded(Real value) {
    if constexpr (std::is_same_v<Real, Stored>) {
      return value;
    } else {
      return static_cast<Real>(Stored(value));
    }
  }

  static void round_all(std::vector<double>& sums) {
    for (double& sum : sums) sum = rounded(static_cast<Real>(sum));
  }

  // Sums are kept as doubles that hold a Real.
  static void add(double& sum, Real value) { sum = static_cast<Real>(static_cast<Real>(sum) + value); }

  static Matrix scaled(const std::vector<const double*>& rows, std::size_t dim, Real factor) {
    Matrix result;
    for (const double* row : rows) {
      for (std::size_t d = 0; d < dim; ++d) result.push_back(rounded(static_cast<Real>(row[d]) * factor));
    }
    return result;
  }

  static Real dot(const Real* a, const Real* b, std::size_t dim) {
    Real sum = 0;
    for (std::size_t d = 0; d < dim; ++d) sum += a[d] * b[d];
    return sum;
  }

  void attend(const Head& head) {
    q_ = scaled(head.q, dim_qk_, scale_q_);
    k_ = scaled(head.k, dim_qk_, scale_k_);
    v_ = scaled(head.v, dim_v_, 1);
    d_o_ = scaled(head.d_o, dim_v_, 1);
    dk_.assign(k_.size(), 0);
    dv_.assign(v_.size(), 0);
    for (std::size_t i = 0; i < head.queries; ++i) {
      if (!softmax(head, i)) continue;
      forward(head, i);
      backward(head, i);
    }
    // The gradient of a key head is the sum over the query heads that share it, each a tensor of its own.
    for (std::size_t j = 0; j < head.keys; ++j) {
      for (std::size_t d = 0; d < dim_qk_; ++d) {
        add(results_.dk[head.key_row[j] * dim_qk_ + d], rounded(rounded(dk_[j * dim_qk_ + d]) * scale_k_));
      }
      for (std::size_t d = 0; d < dim_v_; ++d) {
        add(results_.dv[head.key_row[j] * dim_v_ + d], rounded(dv_[j * dim_v_ + d]));
      }
    }
  }

  // Fills the row of weights; false when there is nothing to attend to.
  bool softmax(const Head& head, std::size_t i) {
    constexpr Real none = -std::numeric_limits<Real>::infinity();
    p_.assign(head.keys, none);
    slope_.assign(head.keys, 1);
    sink_ = rounded(static_cast<Real>(head.sink));
    Real maximum = sink_;
    for (std::size_t j = 0; j < head.keys; ++j) {
      const std::size_t pair = head.pair(i, j);
      if (!head.visible[pair]) continue;
      Real s = rounded(dot(&q_[i * dim_qk_], &k_[j * dim_qk_], dim_qk_));
      if (softcap_ > 0) {
        const Real t = rounded(std::tanh(rounded(s / softcap_)));
        s = rounded(softcap_ * t);
        slope_[j] = rounded(1 - rounded(t * t));
      }
      if (open_.problem.alibi_slopes.given()) s = rounded(s + rounded(static_cast<Real>(head.alibi[pair])));
      if (!head.mask_index.empty()) s = rounded(s + static_cast<Real>(head.mask[pair]));
      p_[j] = s;
      maximum = std::max(maximum, s);
    }
    if (maximum == none) return false;
    Real sum = std::exp(sink_ - maximum);
    for (Real& p : p_) {
      p = std::exp(p - maximum);
      sum += p;
    }
    for (Real& p : p_) p = rounded(p / sum);
    p_sink_ = rounded(std::exp(sink_ - maximum) / sum);
    results_.lse[head.statistic[i]] = maximum + std::log(sum);
    return true;
  }

  void forward(const Head& head, std::size_t i) {
    weights_.resize(head.keys);
    for (std::size_t j = 0; j < head.keys; ++j) {
      weights_[j] = rounded(p_[j] * static_cast<Real>(head.keep[head.pair(i, j)]));
    }
    row_.assign(dim_v_, 0);
    for (std::size_t j = 0; j < head.keys; ++j) add_scaled(row_.data(), weights_[j], &v_[j * dim_v_], dim_v_);
    for (std::size_t d = 0; d < dim_v_; ++d) results_.o[head.query_row[i] * dim_v_ + d] = rounded(row_[d]);
  }

  void backward(const Head& head, std::size_t i) {
    const Real* d_o = &d_o_[i * dim_v_];
    dp_.resize(head.keys);
    Real delta = 0;
    for (std::size_t j = 0; j < head.keys; ++j) {
      dp_[j] =
          rounded(rounded(dot(d_o, &v_[j * dim_v_], dim_v_)) * static_cast<Real>(head.keep[head.pair(i, j)]));
      delta += p_[j] * dp_[j];
      add_scaled(&dv_[j * dim_v_], weights_[j], d_o, dim_v_);
    }
    const Real shift = static_cast<Real>(head.d_lse[i]) - delta;
    row_.assign(dim_qk_, 0);
    for (std::size_t j = 0; j < head.keys; ++j) {
      const Real ds = rounded(p_[j] * (dp_[j] + shift));
      if (!head.mask_index.empty()) add(results_.dmask[head.mask_index[head.pair(i, j)]], ds);
      const Real dproduct = rounded(ds * slope_[j]);
      add_scaled(row_.data(), dproduct, &k_[j * dim_qk_], dim_qk_);
      add_scaled(&dk_[j * dim_qk_], dproduct, &q_[i * dim_qk_], dim_qk_);
    }
    for (std::size_t d = 0; d < dim_qk_; ++d) {
      results_.dq[head.query_row[i] * dim_qk_ + d] = rounded(rounded(row_[d]) * scale_q_);
    }
    if (open_.problem.sinks.given()) add(results_.dsinks[head.head], rounded(p_sink_ * shift));
  }

  static void add_scaled(Real* sum, Real factor, const Real* row, std::size_t dim) {
    for (std::size_t d = 0; d < dim; ++d) sum[d] += factor * row[d];
  }

  const OpenProblem& open_;
  std::size_t dim_qk_;
  std::size_t dim_v_;
  Real softcap_;
  Real scale_k_;
  Real scale_q_;
  Results results_;

  Matrix q_, k_, v_, d_o_, dk_, dv_;                  // of the head
  std::vector<Real> p_, slope_, weights_, dp_, row_;  // of the query
  Real sink_ = 0;
  Real p_sink_ = 0;
};

}  // namespace

Results math_path(const OpenProblem& problem, DType dtype) {
  switch (dtype) {
    case DType::f64: return MathPath<double, double>(problem).run();
    case DType::f16: return MathPath<float, f16>(problem).run();
    case DType::bf16: return MathPath<float, bf16>(problem).run();
    default: return MathPath<float, float>(problem).run();
  }
}

}  // namespace tilewise::test
