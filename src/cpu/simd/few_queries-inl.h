// S = Q·Kᵀ and O = P·V for a panel of few queries, as in decoding. With one query per lane most lanes would
// be idle. Here vectors run along the head dim instead: each element of K and V is loaded once, in order, and
// is used for every query of the panel while it is in a register.

#if defined(TILEWISE_CPU_SIMD_FEW_QUERIES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_FEW_QUERIES_INL_H
#undef TILEWISE_CPU_SIMD_FEW_QUERIES_INL_H
#else
#define TILEWISE_CPU_SIMD_FEW_QUERIES_INL_H
#endif

#include "cpu/simd/transpose-inl.h"
#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

/// Panels of at most this many queries use these functions.
inline constexpr int max_few_queries = 4;

/// Loads the first `count` elements of a vector; the others are 0 and are not read.
HWY_INLINE VF load_first(const float* from, int count) {
  alignas(64) float elements[lanes] = {};
  for (int n = 0; n < count; ++n) elements[n] = from[n];
  return hn::Load(F(), elements);
}

/// scores[j·width + r] = Σ_d k[j][d]·q[r][d] for R queries. q is [R, q_stride] and 0 past `dim`.
template <int R>
void few_query_scores(const RowBlock& k, int keys, int dim, const float* q, std::int64_t q_stride,
                      float* scores, int width) {
  const int whole = dim / lanes * lanes;
  for (int j = 0; j < keys; ++j) {
    const float* row = k.data + j * k.stride;
    VF sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = hn::Zero(F());
    int d = 0;
    for (; d + 2 * lanes <= whole; d += 2 * lanes) {
      const VF k0 = load(row + d);
      const VF k1 = load(row + d + lanes);
      for (int r = 0; r < R; ++r) {
        sum[r][0] = hn::MulAdd(k0, load(q + r * q_stride + d), sum[r][0]);
        sum[r][1] = hn::MulAdd(k1, load(q + r * q_stride + d + lanes), sum[r][1]);
      }
    }
    for (; d < dim; d += lanes) {
      const VF last = d < whole ? load(row + d) : load_first(row + d, dim - d);
      for (int r = 0; r < R; ++r) sum[r][0] = hn::MulAdd(last, load(q + r * q_stride + d), sum[r][0]);
    }
    for (int r = 0; r < R; ++r) {
      scores[j * width + r] = hn::GetLane(hn::SumOfLanes(F(), hn::Add(sum[r][0], sum[r][1])));
    }
  }
}

/// o[r][d] = rescale[r]·o[r][d] + Σ_j p[j·width + r]·v[j][d] for R queries. o is [R, o_stride], where
/// o_stride is a multiple of a vector.
template <int R>
void few_query_output(const RowBlock& v, int keys, int dim, const float* p, int width, const float* rescale,
                      float* o, std::int64_t o_stride) {
  constexpr int W = 2;  // vectors of a row of V per step
  for (int d = 0; d < dim; d += W * lanes) {
    VF sum[R][W];
    for (int r = 0; r < R; ++r) {
      for (int w = 0; w < W; ++w) sum[r][w] = hn::Zero(F());
    }
    const bool whole = d + W * lanes <= dim;
    const int first = std::min(lanes, dim - d);
    const int second = std::clamp(dim - d - lanes, 0, lanes);
    for (int j = 0; j < keys; ++j) {
      const float* row = v.data + j * v.stride + d;
      const VF v0 = whole ? load(row) : load_first(row, first);
      const VF v1 = whole ? load(row + lanes) : load_first(row + lanes, second);
      for (int r = 0; r < R; ++r) {
        const VF p_jr = set(p[j * width + r]);
        sum[r][0] = hn::MulAdd(p_jr, v0, sum[r][0]);
        sum[r][1] = hn::MulAdd(p_jr, v1, sum[r][1]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int w = 0; w < W && d + w * lanes < dim; ++w) {
        float* to = o + r * o_stride + d + w * lanes;
        store(hn::MulAdd(load(to), set(rescale[r]), sum[r][w]), to);
      }
    }
  }
}

/// Calls body with the number of rows, 1 to 4, as a compile-time constant.
template <typename Body>
HWY_INLINE void with_row_count(int rows, const Body& body) {
  switch (rows) {
    case 1: return body(std::integral_constant<int, 1>());
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    default: return body(std::integral_constant<int, 4>());
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
