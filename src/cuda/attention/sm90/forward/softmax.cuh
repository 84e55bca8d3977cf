#pragma once

#include "cuda/attention/sm90/forward/scores.cuh"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda::wgmma {

/// The online softmax of a lane's two rows. S is the bare product Q·Kᵀ, and P = 2^(scale_log2 · S −
/// reference). With a mask P = 2^(scale_log2 · (S − reference)), which takes one more instruction: masks may
/// hold the lowest finite number, which overflows when it is multiplied by log2 e.
///
/// The reference is scale_log2 · maximum, or with a mask the maximum. The maximum is raised only if a score
/// exceeds `limit`. Until then an element of P may grow to less than a third of its row sum, and to 2^8 at
/// most. So O is hardly ever rescaled (an idea of FlashAttention-4). An element that makes up much of its row
/// is 1, which rounding does not change. Therefore O may be divided by the sum of P before rounding, which
/// LSE needs anyway. (The error of O is the sum over keys of share · rounding error · V. With many keys these
/// errors cancel; a key with a third of the row adds less than a third of 2^-8, compared with the half of
/// 2^-8 by which O itself is rounded.)
template <ForwardConfig c>
struct Softmax {
  const float& scale_log2;  ///< in the kernel's parameters, so it takes no register
  float maximum[2];         ///< of each row's scores, or less, as long as no score exceeds `limit`
  float limit[2];           ///< the maximum is raised if a score exceeds it
  float sum[2];             ///< of the lane's own elements of P
  float factor[2];          ///< for O, after the maximum was raised

  __device__ explicit Softmax(const float& unit_) : scale_log2(unit_) {}

  /// Starts with the first scores of the rows.
  template <int keys = c.keys>
  __device__ __forceinline__ void start(const Scores<c>& s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = largest<keys>(s, half, lowest);
      sum[half] = 0;
    }
  }
  /// The largest of a row's scores and `most`, in all four lanes of the row.
  template <int keys = c.keys>
  static __device__ __forceinline__ float largest(const Scores<c>& s, int half, float most) {
#pragma unroll
    for (int n = 2 * half; n < keys / 2; n += 4) most = fmaxf(most, fmaxf(s[n], s[n + 1]));
    return row_maximum(most);
  }
  /// scale_log2 · maximum, rounded; with a mask the maximum.
  __device__ __forceinline__ float reference(int half) const {
    return c.masked ? maximum[half] : fmaxf(maximum[half] * scale_log2, lowest);
  }
  __device__ __forceinline__ float exponential(float s, float of) const {
    return exp2_approx(c.masked ? (s - of) * scale_log2 : fmaf(s, scale_log2, -of));
  }

  /// Raises the maxima where needed. Returns, in all lanes of a warp, whether they were raised: then O must
  /// be rescaled and the limits set.
  __device__ __forceinline__ bool raise_maxima(const Scores<c>& s) {
    // Non-negative floats have the same order as their bits, and one integer instruction compares two.
    // Negative ones count as 0, which at worst leads to the exact comparison below.
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
      factor[half] = exp2_approx((before - reference(half)) * (c.masked ? scale_log2 : 1.0f));
      sum[half] *= factor[half];
    }
    return true;
  }

  /// Replaces S by P and adds P to the sums.
  template <int keys = c.keys>
  __device__ __forceinline__ void exponentiate(Scores<c>& s) {
    const float references[2] = {reference(0), reference(1)};
#pragma unroll
    for (int n = 0; n < keys / 2; n += 2) {
      const int half = n / 2 % 2;
      s[n] = exponential(s[n], references[half]);
      s[n + 1] = exponential(s[n + 1], references[half]);
      sum[half] += s[n] + s[n + 1];
    }
  }

  /// Sets the limits after P was computed with raised maxima. A lane's own sum is about a fourth of its
  /// row's.
  __device__ __forceinline__ void set_limits() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float slack = fminf(fmaxf(__log2f(sum[half]) + 1.0f, 0.0f), 8.0f);
      limit[half] = maximum[half] + __fdividef(slack, scale_log2);
    }
  }
  /// The same where `rows` rows from the lane's first one on are queries. The others may be those of another
  /// packed sequence, and must not raise the maxima of the whole warp: its bits would depend on them.
  __device__ __forceinline__ void set_limits(int rows) {
    set_limits();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (8 * half >= rows) limit[half] = -minus_infinity;
    }
  }

  __device__ __forceinline__ void rescale(Output<c>& o) const {
#pragma unroll
    for (int n = 0; n < c.dim_v / 2; ++n) o[n] *= factor[n / 2 % 2];
  }

  /// The sum of a row of P, in all four lanes of the row.
  __device__ __forceinline__ float row_sum(int half) const { return cuda::row_sum(sum[half]); }
  /// LSE of a row with this maximum and sum. The correction makes up for the rounding of the reference.
  __device__ __forceinline__ float lse(float most, float row, const LseScale& to) const {
    if (row == 0) return minus_infinity;
    if (c.masked && !c.combined()) return fmaf(most, to.scale, logf(row));
    const float correction =
        c.masked ? 1.0f : exp2f(fmaf(-most, scale_log2, fmaxf(most * scale_log2, lowest)));
    const float spread = logf(row * correction);  // 0 if one key has all of P
    // Tensor cores truncate S (cut_off). So LSE is too low by what the mean of S, weighted by P, has lost.
    // This mean lies about a third of the spread below the largest score.
    const float peak = most * to.scale;
    const float mean = fmaxf(peak - 0.35f * spread, fminf(peak, 0.0f));
    const float rest = fmaf(most, to.rest, mean * to.cut_off);
    return fmaxf(fmaf(most, to.scale, spread + rest), lowest);
  }
};

}  // namespace tilewise::cuda::wgmma
