#pragma once

#include "attention/call.h"
#include "cuda/attention/common/accumulator.cuh"
#include "cuda/attention/common/dropout.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda {

/// tanh exact to f32: the device library's tanhf.
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }

/// tanh of x, and its derivative: 1 − 2 / (e^2x + 1), and 4 e^2x / (e^2x + 1)². The error is at most 2e-7,
/// which does not matter for a score whose P is rounded to 16 bits.
__device__ __forceinline__ float tanh_of(float x, float& derivative) {
  const float power = exp2_approx(fminf(x, 40.0f) * (2 * log2e));
  const float inverse = __fdividef(1.0f, power + 1);
  derivative = 4 * inverse * (power * inverse);
  return fmaf(-2.0f, inverse, 1.0f);
}

/// What dS is multiplied by, for a head's logit scale, before it goes into dQ. The gradient of the scale, Σ
/// dS·scale·q·k, is q·dQ divided by this factor. So it is 1 where the scale is 0, or at most `least`; then dQ
/// is multiplied by the scale at the end, and dK gets nothing from the head.
__device__ __forceinline__ float differentiable(float logit, float least = 0) {
  return fabsf(logit) <= least ? 1.0f : logit;
}

/// The rule that turns a product q·k of one entry and head into its score: scale, softcap, ALiBi and mask, in
/// this order. Scores are in natural units: in units of log2 e, which suit exp2, a mask of the lowest finite
/// number would overflow. Calls with nothing but a scale may use `scale_log2` and stay in those units.
///
/// Kernels apply it to a whole accumulator (scale_and_cap, add_alibi) or to one pair (score_of). Each kernel
/// adds the mask in its own way, as its elements arrive: from memory, by TMA, or four at a time.
struct ScoreRule {
  float scale;       ///< with the head's logit scale; with softcap divided by c
  float scale_log2;  ///< scale · log2 e
  float cap;         ///< c
  float slope;       ///< of ALiBi
  float logit;       ///< what dS is multiplied by for the head's logit scale
  bool adds_dk;      ///< see differentiable()
  bool softcap, alibi, mask, boolean_mask;

  /// The rule of a call that has nothing but a scale.
  __device__ explicit ScoreRule(const AttentionCall& call)
      : scale(static_cast<float>(call.scale)),
        scale_log2(static_cast<float>(call.scale * 1.4426950408889634)),
        cap(0),
        slope(0),
        logit(1),
        adds_dk(true),
        softcap(false),
        alibi(false),
        mask(false),
        boolean_mask(false) {}
  __device__ ScoreRule(const AttentionCall& call, std::int64_t b, std::int64_t h) {
    const AttentionFeatures& features = call.problem.features;
    softcap = features.softcap;
    alibi = features.alibi;
    mask = features.mask != MaskKind::none;
    boolean_mask = features.mask == MaskKind::boolean;
    const double of_head = call.scale_of(h);
    scale = static_cast<float>(softcap ? of_head / call.softcap : of_head);
    logit = features.logit_scale ? static_cast<float>(call.logit_scale.at(b, h)) : 1.0f;
    adds_dk = logit != 0;
    if (call.dlogit_scale != nullptr) logit = differentiable(logit);
    scale_log2 = static_cast<float>(call.scale * 1.4426950408889634);
    cap = static_cast<float>(call.softcap);
    slope = alibi ? static_cast<float>(call.alibi_slopes.at(b, h)) : 0.0f;
  }

  /// d score / d (scale·q·k), where `tangent` is tanh of the capped score.
  __device__ float derivative(float tangent) const {
    return (softcap ? 1 - tangent * tangent : 1.0f) * logit;
  }
};

/// Scale and softcap of a whole accumulator. Every step is rounded by itself, as in score_of().
template <typename View, typename S>
__device__ __forceinline__ void scale_and_cap(S& s, float scale, bool softcap, float cap) {
  if (softcap) {
    View::each([&](int q, int k) {
      float& score = View::at(s, q, k);
      score = __fmul_rn(tanh_of(__fmul_rn(score, scale)), cap);
    });
  } else {
    View::each([&](int q, int k) { View::at(s, q, k) = __fmul_rn(View::at(s, q, k), scale); });
  }
}

/// ALiBi of a whole accumulator: S −= slope · distance. `slope(q)` is the slope of the lane's query q, and
/// `distance(q)` its distance from the lane's first key.
template <typename View, typename S, typename Slope, typename Distance>
__device__ __forceinline__ void add_alibi(S& s, const Slope& slope, const Distance& distance) {
  View::each([&](int q, int k) {
    float& score = View::at(s, q, k);
    score = __fsub_rn(score, __fmul_rn(slope(q), static_cast<float>(abs(distance(q) - View::step(k)))));
  });
}

/// LSE, dLSE or delta of a row, in f32 or f64.
__device__ __forceinline__ double statistic_of(const Rows& rows, std::int64_t b, std::int64_t h,
                                               std::int64_t s) {
  const std::byte* at = rows.at(b, h, s);
  return rows.dtype == DType::f64 ? *reinterpret_cast<const double*>(at)
                                  : static_cast<double>(*reinterpret_cast<const float*>(at));
}

/// The score of a pair from its product. `tangent` receives tanh of the capped score, for the derivative.
/// Every step is rounded by itself, so that a score is the same number in every kernel. `placed`: the call
/// may be a piece whose positions count from elsewhere (PieceDetails::placed).
template <bool placed = false>
__device__ __forceinline__ float score_of(const AttentionCall& call, const ScoreRule& rules,
                                          const Sequence& sequence, std::int64_t b, std::int64_t h,
                                          std::int64_t i, std::int64_t j, float product, float& tangent) {
  float s = __fmul_rn(product, rules.scale);
  if (rules.softcap) {
    tangent = tanh_of(s);
    s = __fmul_rn(tangent, rules.cap);
  }
  if (rules.alibi) {
    const std::int64_t distance =
        placed ? call.distance(sequence, i, j) : i + sequence.length_k - sequence.length_q - j;
    s = __fsub_rn(s, __fmul_rn(rules.slope, static_cast<float>(distance < 0 ? -distance : distance)));
  }
  if (!rules.mask) return s;
  const std::byte* at = call.mask.at(b, h, i, j);
  if (rules.boolean_mask) return *at == std::byte{0} ? minus_infinity : s;
  const float bias = load_element(at, call.mask.dtype);
  return bias == minus_infinity ? bias : __fadd_rn(s, bias);  // hides a NaN, too
}

/// Joins a sink, a score without a value, to a row's softmax. Raises `maximum` to the higher of the two, and
/// returns the factor of the row's P; `weight` is that of the sink. A sink may be far above every score, and
/// then all of O depends on the factor, so this is no approximate exponential.
__device__ __forceinline__ float join_sink(float sink, float& maximum, float& weight) {
  const float highest = fmaxf(maximum, sink);
  const float factor = expf(maximum - highest);
  weight = expf(sink - highest);
  maximum = highest;
  return factor;
}

}  // namespace tilewise::cuda
