#pragma once

#include "cuda/attention/common/forward/fragments.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm80/forward/tuning.h"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"

namespace tilewise::cuda::mma {

// The online softmax of a warp.

/// Weights of 16 keys as factors of a product.
template <ForwardConfig c>
using Weights = std::uint32_t[c.row_tiles][4];

/// What turns scores into exponents of 2. In the plain kernel scores are bare products, and an exponent is
/// one multiply-add from them: unit · s − reference, the reference being unit · maximum, rounded. In the
/// general one scores are finished and in natural units, where a mask of the lowest finite number does not
/// overflow; and there weights are times a power of two, since dropout may keep the smallest alone, and f16
/// has nothing below 6e-8.
template <bool general>
struct Exponents {
  float unit;
  float slack;      ///< of maxima, see raise_maxima
  float above = 0;  ///< the exponent of that power, where general

  __device__ explicit Exponents(float unit_, float above_ = 0)
      : unit(unit_), slack(8 / unit_), above(above_) {}

  __device__ float reference(float maximum) const {
    return general ? maximum : fmaxf(maximum * unit, lowest);
  }
  __device__ float weight(float s, float reference_) const {
    return exp2_approx(general ? fmaf(s - reference_, unit, above) : fmaf(s, unit, -reference_));
  }
  /// What weights relative to one reference are to be multiplied by to be relative to a later one.
  __device__ float rescale(float before, float after) const {
    return exp2_approx(general ? (before - after) * unit : before - after);
  }
};

template <ForwardConfig c>
struct SoftmaxRows {
  float maximum[c.row_tiles][2];  ///< what weights are relative to; from the lowest on
  float sum[c.row_tiles][2];      ///< of the lane's own weights as they are, for lse
  float rounded[c.row_tiles][4];  ///< of the row's weights as o has them, by a product with ones

  __device__ SoftmaxRows() {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[r][half] = lowest;
        sum[r][half] = 0;
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) rounded[r][n] = 0;
    }
  }
};

/// Whether one of a lane's weights, of which these are sums, may be more than 2^8.
template <ForwardConfig c>
__device__ __forceinline__ bool too_large(const float (&sums)[c.row_tiles][2]) {
  constexpr float most = 256;
  bool large = false;
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) large = large || sums[r][0] > most || sums[r][1] > most;
  return large;
}

/// Raises the maxima to the highest scores of their rows, and makes what was summed relative to them.
template <ForwardConfig c, bool general, int eights>
__device__ __forceinline__ void raise_to(const float (&highest)[c.row_tiles][2],
                                         const Exponents<general>& exponents, SoftmaxRows<c>& rows,
                                         float (&o)[c.row_tiles][eights][4]) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = exponents.reference(rows.maximum[r][half]);
      rows.maximum[r][half] = fmaxf(rows.maximum[r][half], highest[r][half]);
      const float rescale = exponents.rescale(before, exponents.reference(rows.maximum[r][half]));
      rows.sum[r][half] *= rescale;
      rows.rounded[r][2 * half] *= rescale;
      rows.rounded[r][2 * half + 1] *= rescale;
      rescale_row(o[r], half, rescale);
    }
  }
}

/// Whether a maximum is more than the slack below one of the lane's scores, or may be. Floats that are not
/// negative compare as their bits do, and of integers there is a maximum of three (sm_90). Where the limit is
/// negative, 0 is above it, and the answer is yes.
template <ForwardConfig c, bool general>
__device__ __forceinline__ bool may_rise(const Scores<c>& s, const Exponents<general>& exponents,
                                         const SoftmaxRows<c>& rows) {
  bool rises = false;
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int most = 0;
#pragma unroll
      for (int n = 0; n < c.keys / 8; ++n) {
        most = __vimax3_s32(most, __float_as_int(s[r][n][2 * half]), __float_as_int(s[r][n][2 * half + 1]));
      }
      rises = rises || most > __float_as_int(rows.maximum[r][half] + exponents.slack);
    }
  }
  return rises;
}

/// Raises the maxima. They are let lie until they are 2^8 too low: a weight may then reach that, the sums
/// lose nothing, and o is hardly ever rescaled (an idea of FlashAttention-4).
template <ForwardConfig c, bool general>
__device__ __forceinline__ void raise_maxima(const Scores<c>& s, const Exponents<general>& exponents,
                                             SoftmaxRows<c>& rows, Output<c>& o) {
  if (!__any_sync(~0u, may_rise<c, general>(s, exponents, rows))) return;
  float highest[c.row_tiles][2];
  bool rises = false;
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[r][half] = highest_of<MmaView<c.row_tiles, c.keys / 8>>(s, 2 * r + half);
      rises = rises || highest[r][half] > rows.maximum[r][half] + exponents.slack;
    }
  }
  if (!__any_sync(~0u, rises)) return;
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) highest[r][half] = row_maximum(highest[r][half]);
  }
  raise_to<c, general>(highest, exponents, rows, o);
}

/// Weights of the keys of one step of 16, rounded for the product with values. What they sum to before that
/// goes to `sums`.
template <typename T, ForwardConfig c, bool general>
__device__ __forceinline__ void weigh(Weights<c>& weights, const Scores<c>& s, int step,
                                      const Exponents<general>& exponents,
                                      const float (&references)[c.row_tiles][2],
                                      float (&sums)[c.row_tiles][2]) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // eight keys n / 2 of the step, row half n % 2
      const int half = n % 2;
      const float(&four)[4] = s[r][2 * step + n / 2];
      const float low = exponents.weight(four[2 * half], references[r][half]);
      const float high = exponents.weight(four[2 * half + 1], references[r][half]);
      sums[r][half] += low + high;
      weights[r][n] = pack<T>(low, high);
    }
  }
}

/// What those weights lost in rounding, rounded itself: a second factor for the product with values.
template <typename T, ForwardConfig c, bool general>
__device__ __forceinline__ void weigh_lost(Weights<c>& lost, const Weights<c>& weights, const Scores<c>& s,
                                           int step, const Exponents<general>& exponents,
                                           const float (&references)[c.row_tiles][2]) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int half = n % 2;
      const float(&four)[4] = s[r][2 * step + n / 2];
      const float2 rounded = unpack<T>(weights[r][n]);
      lost[r][n] = pack<T>(exponents.weight(four[2 * half], references[r][half]) - rounded.x,
                           exponents.weight(four[2 * half + 1], references[r][half]) - rounded.y);
    }
  }
}

}  // namespace tilewise::cuda::mma
