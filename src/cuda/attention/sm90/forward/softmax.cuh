#pragma once

#include "cuda/attention/sm90/forward/scores.cuh"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda::wgmma {

/// Finite: a row that saw nothing needs no special case.
inline constexpr float lowest = -3.402823466e38f;

/// The online softmax of a lane's two rows. Scores are bare products; a weight is 2^(unit · s − reference).
/// With a mask it is 2^(unit · (s − reference)), an instruction more: the lowest finite number, which masks
/// have, times log2 e is infinite, and differences from it would be lost in the product.
///
/// The reference is unit · maximum, or the maximum itself, but the maximum is raised only where a score is
/// above `limit`: weights may grow up to what is less than a third of their row's sum then, and to 2^8. o is
/// hardly ever rescaled that way (an idea of FlashAttention-4), and a weight that alone makes up much of its
/// row is 1, which rounding leaves as it is: so o may be divided by the sum of weights that are not rounded,
/// which lse needs. (What rounding does to o is the sum over keys of share · rounding · value. Where many
/// keys have their shares, roundings cancel; where one has a third, it is less than a third of 2^-8, beside
/// half of 2^-8 by which o itself is rounded at best.)
template <ForwardConfig c>
struct Softmax {
  const float& unit;  ///< in the kernel's parameters, where it takes no register
  float maximum[2];   ///< of each row, or a little less
  float limit[2];     ///< of scores, before the maximum is raised
  float sum[2];       ///< of the lane's own weights
  float factor[2];    ///< what o is to be multiplied by since the maximum was raised

  __device__ explicit Softmax(const float& unit_) : unit(unit_) {}

  /// With the first scores of the rows.
  template <int keys = c.keys>
  __device__ __forceinline__ void start(const Scores<c>& s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = largest<keys>(s, half, lowest);
      sum[half] = 0;
    }
  }
  /// The largest of a row's scores and `most`, in all its lanes.
  template <int keys = c.keys>
  static __device__ __forceinline__ float largest(const Scores<c>& s, int half, float most) {
#pragma unroll
    for (int n = 2 * half; n < keys / 2; n += 4) most = fmaxf(most, fmaxf(s[n], s[n + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  }
  /// unit · maximum, rounded; with a mask the maximum.
  __device__ __forceinline__ float reference(int half) const {
    return c.masked ? maximum[half] : fmaxf(maximum[half] * unit, lowest);
  }
  __device__ __forceinline__ float weight(float s, float of) const {
    return exp2_approx(c.masked ? (s - of) * unit : fmaf(s, unit, -of));
  }

  /// Raises the maxima where needed; true, in all lanes of a warp, where they were: o must be rescaled and
  /// the limits set.
  __device__ __forceinline__ bool raise(const Scores<c>& s) {
    // Floats that are not negative compare as their bits do, two at a time; below 0 is 0, which is more and
    // leads to the exact comparison at worst.
    int high[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < c.keys / 2; n += 2) {
      int& most = high[n / 2 % 2];
      most = __vimax3_s32(most, __float_as_int(s[n]), __float_as_int(s[n + 1]));
    }
    const bool rises = __int_as_float(high[0]) > limit[0] || __int_as_float(high[1]) > limit[1];
    if (!__any_sync(~0u, rises)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = reference(half);
      maximum[half] = largest(s, half, maximum[half]);
      factor[half] = exp2_approx((before - reference(half)) * (c.masked ? unit : 1.0f));
      sum[half] *= factor[half];
    }
    return true;
  }

  /// Scores become weights and join the sums.
  template <int keys = c.keys>
  __device__ __forceinline__ void weigh(Scores<c>& s) {
    const float references[2] = {reference(0), reference(1)};
#pragma unroll
    for (int n = 0; n < keys / 2; n += 2) {
      const int half = n / 2 % 2;
      s[n] = weight(s[n], references[half]);
      s[n + 1] = weight(s[n + 1], references[half]);
      sum[half] += s[n] + s[n + 1];
    }
  }

  /// Sets the limits after sums were made with raised maxima. A lane's own sum is a fourth of its row's, more
  /// or less.
  __device__ __forceinline__ void set_limits() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float slack = fminf(fmaxf(__log2f(sum[half]) + 1.0f, 0.0f), 8.0f);
      limit[half] = maximum[half] + __fdividef(slack, unit);
    }
  }

  __device__ __forceinline__ void rescale(Output<c>& o) const {
#pragma unroll
    for (int n = 0; n < c.dim_v / 2; ++n) o[n] *= factor[n / 2 % 2];
  }

  /// The sum of a row's weights, in all its lanes.
  __device__ __forceinline__ float row_sum(int half) const {
    const float two = sum[half] + __shfl_xor_sync(~0u, sum[half], 1);
    return two + __shfl_xor_sync(~0u, two, 2);
  }
  /// lse of a row of that maximum and sum. The reference was rounded; the maximum in natural units is not.
  __device__ __forceinline__ float lse(float most, float row, const LseScale& to) const {
    if (row == 0) return minus_infinity;
    if (c.masked) return fmaf(most, to.scale, logf(row));
    const float correction = exp2f(fmaf(-most, unit, fmaxf(most * unit, lowest)));
    const float spread = logf(row * correction);  // 0 where one key has all the weight
    // What was cut off of scores is missing as it is from their mean by weight, which lies about a third of
    // the spread below the largest.
    const float peak = most * to.scale;
    const float mean = fmaxf(peak - 0.35f * spread, fminf(peak, 0.0f));
    const float rest = fmaf(most, to.rest, mean * to.cut_off);
    return fmaxf(fmaf(most, to.scale, spread + rest), lowest);
  }
};

}  // namespace tilewise::cuda::wgmma
