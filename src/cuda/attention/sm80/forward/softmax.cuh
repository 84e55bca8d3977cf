#pragma once

#include "cuda/attention/common/forward/scores.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm80/forward/tuning.h"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"

namespace tilewise::cuda::mma {

// The online softmax of a warp.

/// P of 16 keys as fragments of operand A.
template <ForwardConfig c>
using Probabilities = std::uint32_t[c.row_tiles][4];

/// Turns scores into exponents of 2. In the plain kernel S is not scaled, and an exponent is one
/// multiply-add: scale_log2 · s − reference, where the reference is scale_log2 · maximum, rounded. In the
/// general kernel scores are in natural units, in which a mask of the lowest finite number does not overflow.
/// There P is multiplied by 2^p_scale_bits, because dropout may keep only the smallest elements, and f16
/// holds nothing below 6e-8.
template <bool general>
struct Exponents {
  float scale_log2;
  float slack;             ///< how much too low a maximum may be, see raise_maxima
  float p_scale_bits = 0;  ///< 0 in the plain kernel

  __device__ explicit Exponents(float scale_log2_, float p_scale_bits_ = 0)
      : scale_log2(scale_log2_), slack(8 / scale_log2_), p_scale_bits(p_scale_bits_) {}

  __device__ float reference(float maximum) const {
    return general ? maximum : fmaxf(maximum * scale_log2, lowest);
  }
  __device__ float p(float s, float reference_) const {
    return exp2_approx(general ? fmaf(s - reference_, scale_log2, p_scale_bits)
                               : fmaf(s, scale_log2, -reference_));
  }
  /// The factor of sums of P when its reference changes.
  __device__ float rescale(float before, float after) const {
    return exp2_approx(general ? (before - after) * scale_log2 : before - after);
  }
};

template <ForwardConfig c>
struct SoftmaxRows {
  float maximum[c.row_tiles][2];  ///< what P is relative to; at least `lowest`
  float sum[c.row_tiles][2];      ///< of the lane's own P in f32, for LSE
  float rounded[c.row_tiles][4];  ///< row sums of P as rounded for P·V, by a product with ones

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

/// Whether an element of P may be more than 2^8, judged by a lane's sums of P.
template <ForwardConfig c>
__device__ __forceinline__ bool too_large(const float (&sums)[c.row_tiles][2]) {
  constexpr float most = 256;
  bool large = false;
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) large = large || sums[r][0] > most || sums[r][1] > most;
  return large;
}

/// Raises the maxima to `highest` and rescales the sums and O.
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

/// Whether some score of the lane may be p_scale_bits its maximum plus the slack. Floats that are not
/// negative compare as their bits do, and integers have a maximum of three (sm_90). Where the limit is
/// negative, `most` is at least 0 and the answer is yes.
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

/// Raises the maxima once they are 2^8 too low. Until then P may be up to 2^8, the sums lose nothing, and O
/// is hardly ever rescaled (an idea of FlashAttention-4).
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

/// P of one step of 16 keys, rounded for P·V. `sums` gets the row sums before rounding.
template <typename T, ForwardConfig c, bool general>
__device__ __forceinline__ void exponentiate(Probabilities<c>& p, const Scores<c>& s, int step,
                                             const Exponents<general>& exponents,
                                             const float (&references)[c.row_tiles][2],
                                             float (&sums)[c.row_tiles][2]) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // eight keys n / 2 of the step, row half n % 2
      const int half = n % 2;
      const float(&four)[4] = s[r][2 * step + n / 2];
      const float low = exponents.p(four[2 * half], references[r][half]);
      const float high = exponents.p(four[2 * half + 1], references[r][half]);
      sums[r][half] += low + high;
      p[r][n] = pack<T>(low, high);
    }
  }
}

/// The rounding errors of P, rounded themselves: operand A of a second product with V.
template <typename T, ForwardConfig c, bool general>
__device__ __forceinline__ void rounding_errors(Probabilities<c>& lost, const Probabilities<c>& p,
                                                const Scores<c>& s, int step,
                                                const Exponents<general>& exponents,
                                                const float (&references)[c.row_tiles][2]) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int half = n % 2;
      const float(&four)[4] = s[r][2 * step + n / 2];
      const float2 rounded = unpack<T>(p[r][n]);
      lost[r][n] = pack<T>(exponents.p(four[2 * half], references[r][half]) - rounded.x,
                           exponents.p(four[2 * half + 1], references[r][half]) - rounded.y);
    }
  }
}

}  // namespace tilewise::cuda::mma
