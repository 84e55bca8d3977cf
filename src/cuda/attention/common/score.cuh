#pragma once

#include "attention/call.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda {

inline constexpr float log2e = 1.4426950408889634f;
inline constexpr float minus_infinity = -__builtin_huge_valf();

/// What turns a product q·k of one entry and head into a score. Scores are in natural units: in units of log2
/// e, which exp2 would like, a mask of the lowest finite number would overflow. Calls that have nothing but
/// the scale may use `scale_log2` instead and stay in those.
struct ScoreRules {
  float scale;       ///< with softcap scale / c
  float scale_log2;  ///< scale·log2 e
  float cap;         ///< c
  float slope;       ///< ALiBi's
  bool softcap, alibi, mask, boolean_mask;

  /// Of a call that has nothing but the scale.
  __device__ explicit ScoreRules(const AttentionCall& call)
      : scale(static_cast<float>(call.scale)),
        scale_log2(static_cast<float>(call.scale * 1.4426950408889634)),
        cap(0),
        slope(0),
        softcap(false),
        alibi(false),
        mask(false),
        boolean_mask(false) {}
  __device__ ScoreRules(const AttentionCall& call, std::int64_t b, std::int64_t h) {
    const AttentionFeatures& features = call.problem.features;
    softcap = features.softcap;
    alibi = features.alibi;
    mask = features.mask != MaskKind::none;
    boolean_mask = features.mask == MaskKind::boolean;
    scale = static_cast<float>(softcap ? call.scale / call.softcap : call.scale);
    scale_log2 = static_cast<float>(call.scale * 1.4426950408889634);
    cap = static_cast<float>(call.softcap);
    slope = alibi ? static_cast<float>(call.alibi_slopes.at(b, h)) : 0.0f;
  }
};

/// tanh to f32 accuracy; tanhf of the device library.
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }

/// What ALiBi and the mask add at (i, j); −inf where a boolean mask hides. `placed`, here and below: the call
/// may be a piece whose positions count from elsewhere (PieceDetails::placed).
template <bool placed = false>
__device__ __forceinline__ float score_bias(const AttentionCall& call, const ScoreRules& rules,
                                            const Sequence& sequence, std::int64_t b, std::int64_t h,
                                            std::int64_t i, std::int64_t j) {
  float bias = 0;
  if (rules.alibi) {
    const std::int64_t distance =
        placed ? call.distance(sequence, i, j) : i + sequence.length_k - sequence.length_q - j;
    bias = -__fmul_rn(rules.slope, static_cast<float>(distance < 0 ? -distance : distance));
  }
  if (rules.mask) {
    const std::byte* at = call.mask.at(b, h, i, j);
    if (rules.boolean_mask) {
      if (*at == std::byte{0}) bias = minus_infinity;
    } else {
      bias += load_element(at, call.mask.dtype);
    }
  }
  return bias;
}

/// lse, d_lse or delta of a row, in f32 or f64.
__device__ __forceinline__ double statistic_of(const Rows& rows, std::int64_t b, std::int64_t h,
                                               std::int64_t s) {
  const std::byte* at = rows.at(b, h, s);
  return rows.dtype == DType::f64 ? *reinterpret_cast<const double*>(at)
                                  : static_cast<double>(*reinterpret_cast<const float*>(at));
}

/// The score of a pair from its product. `tangent` receives tanh of the capped score, for its derivative.
/// Every step is rounded by itself: a score is the same number in every kernel, whatever is done with it
/// next.
template <bool placed = false>
__device__ __forceinline__ float score_of(const AttentionCall& call, const ScoreRules& rules,
                                          const Sequence& sequence, std::int64_t b, std::int64_t h,
                                          std::int64_t i, std::int64_t j, float product, float& tangent) {
  float s = __fmul_rn(product, rules.scale);
  if (rules.softcap) {
    tangent = tanh_of(s);
    s = __fmul_rn(tangent, rules.cap);
  }
  const float bias = score_bias<placed>(call, rules, sequence, b, h, i, j);
  return bias == minus_infinity ? bias : __fadd_rn(s, bias);
}

/// What dropout makes of the weight of (i, j): 0 or keep_scale. Four keys that share a counter are drawn at
/// once. The call may be a placed piece.
struct DropoutFactors {
  float factor[4];

  /// Whether four keys from `first_key` on share a counter, as they and all later fours then do.
  __device__ static bool share_counters(const AttentionCall& call, std::int64_t first_key) {
    return call.place.key(first_key) % 4 == 0 && call.place.step == 1;
  }

  __device__ DropoutFactors(const AttentionCall& call, std::int64_t b, std::int64_t h, std::int64_t i,
                            std::int64_t first_key) {
    const DropoutMask dropout = call.dropout.drawn();
    const auto words =
        philox({static_cast<std::uint32_t>(call.place.key(first_key) / 4),
                static_cast<std::uint32_t>(call.place.query(i)), call.place.head_index(b, h), dropout.stream},
               dropout.key);
    for (int n = 0; n < 4; ++n) factor[n] = words[n] >= dropout.threshold ? dropout.keep_scale : 0.0f;
  }
};

template <bool placed = false>
__device__ __forceinline__ float dropout_factor(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                                std::int64_t i, std::int64_t j) {
  const std::uint32_t head =
      placed ? call.place.head_index(b, h) : static_cast<std::uint32_t>(b * call.problem.heads_q + h);
  const auto query = static_cast<std::uint32_t>(placed ? call.place.query(i) : i);
  const auto key = static_cast<std::uint32_t>(placed ? call.place.key(j) : j);
  const bool kept = call.dropout.drawn().keeps(head, query, key);
  return kept ? call.dropout.keep_scale : 0.0f;
}

}  // namespace tilewise::cuda
