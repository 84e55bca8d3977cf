#pragma once

#include "cuda/attention/common/f32/products.cuh"
#include "cuda/attention/common/f32/split_rows.cuh"
#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/common/forward/scores.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda::mma_f32 {

// The forward kernels of sm80 and sm90 for split f32 share this: a warp's queries and their online softmax.

using mma::ForwardGrid;
using mma::hide;
using mma::Place;
using mma::QueryRows;
using mma::Scores;
using mma::seen_by_warp;

/// P is multiplied by this before it is split, so that f16 loses at most 2^-37 of a low P. Added to the
/// exponent of 2 instead, it would cost digits. The row's maximum may be up to 2^slack too low, so P reaches
/// 2^15.
inline constexpr int p_scale_log2 = 12;
inline constexpr float p_scale = 1 << p_scale_log2;
inline constexpr float slack = 3;
/// With one part, P is multiplied by a factor per tile. With a smaller factor than this, too few digits of P
/// are left if no other tile counts.
inline constexpr float least_factor = 0x1p-16f;

/// The queries of a warp, with O and the sums of their softmax.
template <auto c>
struct QueryState {
  const AttentionCall& call;
  const QueryRows& rows;
  const Place<c> place{};
  const float scale_log2;  ///< turns a product q·k into an exponent of 2
  ScaledSum<c> o;
  float maximum[c.row_tiles][2];  ///< that P is relative to, in units of log2 e
  float sum[c.row_tiles][2];      ///< of the lane's own P; with one part times p_scale
  int row_exponents[c.row_tiles][2];

  __device__ QueryState(const AttentionCall& call_, const QueryRows& rows_)
      : call(call_), rows(rows_), scale_log2(static_cast<float>(call.scale * 1.4426950408889634)) {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[r][half] = lowest;
        sum[r][half] = 0;
      }
    }
  }

  /// Splits the warp's queries into parts, laid out by `Tile`. Returns whether they fit.
  template <typename Tile>
  __device__ bool load_queries(std::byte* q_smem, int* exponents_smem) {
    constexpr int lanes = std::min(32, Tile::chunks);  // per row
    constexpr int at_once = 32 / lanes;
    const auto dims = static_cast<int>(call.problem.dim_qk);
    const bool aligned = aligned_fours(call.q);
    const int chunk = place.lane % lanes;
    bool loses = false;
    constexpr int batch = 8;  // loads in flight
    static_assert(c.warp_rows() % (batch * at_once) == 0 || c.warp_rows() < batch * at_once);
    constexpr int rounds = std::min(batch, c.warp_rows() / at_once);
#pragma unroll 1
    for (int first = 0; first < c.warp_rows(); first += rounds * at_once) {
      const int first_row = place.first_row() + first + place.lane / lanes;
      float x[rounds][8];
      // The general case is a branch of its own and not inside the rounds. Its instructions would be fetched
      // even if skipped, and a CTA's first instructions take longer to fetch than to execute.
      if (aligned && dims % 8 == 0 && rows.heads == 1) {
        const float* from = rows.float_of(call.q, first_row) + chunk * 8;
        const int present = chunk * 8 < dims ? rows.count() - first_row : 0;
#pragma unroll
        for (int n = 0; n < rounds; ++n) {
          const int row = n * at_once;
          if (row < present) {
            load_aligned(x[n], from + row * call.q.stride_s);
          } else {
#pragma unroll
            for (float& number : x[n]) number = 0;
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < rounds; ++n) load_row(x[n], first_row + n * at_once, chunk, dims);
      }
      float largest[rounds];
#pragma unroll
      for (int n = 0; n < rounds; ++n) {
        largest[n] = 0;
#pragma unroll
        for (int m = 0; m < 8; ++m) largest[n] = fmaxf(largest[n], fabsf(x[n][m]));
      }
      // The shuffles of all rounds are interleaved, because each waits for the one before it.
#pragma unroll
      for (int apart = lanes / 2; apart > 0; apart /= 2) {
#pragma unroll
        for (int n = 0; n < rounds; ++n) {
          largest[n] = fmaxf(largest[n], __shfl_xor_sync(~0u, largest[n], apart));
        }
      }
#pragma unroll
      for (int n = 0; n < rounds; ++n) {
        const int row = first_row + n * at_once;
        const int exponent = exponent_for(largest[n]);
        uint4 chunks[c.parts];
        loses |= split_eight<c.parts>(chunks, x[n], power_of_two(exponent));
#pragma unroll
        for (int part = 0; part < c.parts; ++part) {
          *reinterpret_cast<uint4*>(q_smem + part * c.query_part_bytes() + Tile::offset(row, chunk)) =
              chunks[part];
        }
        if (chunk == 0) exponents_smem[row] = exponent;
      }
    }
    __syncwarp();  // the warp's rows are in shared memory
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) row_exponents[r][half] = exponents_smem[place.row(r, half)];
    }
    return !__any_sync(~0u, loses) || !harmful<Tile>(q_smem, exponents_smem);
  }

  /// Eight numbers of a query; 0 past the last query.
  __device__ __forceinline__ void load_row(float (&x)[8], int row, int chunk, int dims) const {
    const bool present = row < rows.count();
    load_eight(x, rows.float_of(call.q, present ? row : 0), chunk * 8, present ? dims : 0, false);
  }

  /// Whether the digits that the warp's queries lose do harm. Most warps have too few such numbers to matter;
  /// the others read their queries once more and count.
  template <typename Tile>
  __device__ bool harmful(const std::byte* q_smem, const int* exponents_smem) const {
    constexpr int lanes = std::min(32, Tile::chunks);
    const int chunk = place.lane % lanes;
    const auto each_row = [&](const auto& body) {
#pragma unroll 1
      for (int n = place.lane / lanes; n < c.warp_rows(); n += 32 / lanes) body(place.first_row() + n);
    };
    unsigned small = 0;
    each_row([&](int row) {
      const auto highs = *reinterpret_cast<const uint4*>(q_smem + Tile::offset(row, chunk));
      for (const std::uint32_t pair : {highs.x, highs.y, highs.z, highs.w}) {
        const float2 two = unpack<__half>(pair);
        small += (fabsf(two.x) <= Losses::least<c.parts> ? 1 : 0) +
                 (fabsf(two.y) <= Losses::least<c.parts> ? 1 : 0);
      }
    });
    if (__reduce_add_sync(~0u, small) < Losses::few) return false;
    Losses losses;
    each_row([&](int row) {
      float x[8];
      load_row(x, row, chunk, static_cast<int>(call.problem.dim_qk));
      count_losses<c.parts>(losses, x, power_of_two(exponents_smem[row]));
    });
#pragma unroll
    for (unsigned& count : losses.counts) count = __reduce_add_sync(~0u, count);
    return losses.harmful();
  }

  /// Raises the maxima where they are more than `slack` too low. `scales_log2` turn the tile's products into
  /// exponents of 2.
  __device__ void raise_maxima(const Scores<c>& s, const float (&scales_log2)[c.row_tiles][2]) {
    float highest[c.row_tiles][2];  // of the lane's own keys
    bool rises = false;
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        highest[r][half] =
            highest_of<MmaView<c.row_tiles, c.keys / 8>>(s, 2 * r + half) * scales_log2[r][half];
        rises |= highest[r][half] > maximum[r][half] + slack;
      }
    }
    if (!__any_sync(~0u, rises)) return;
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = maximum[r][half];
        maximum[r][half] = fmaxf(before, row_maximum(highest[r][half]));
        const float rescale = exp2_approx(before - maximum[r][half]);
        sum[r][half] *= rescale;
        rescale_row(o.sum[r], half, rescale);
      }
    }
  }

  /// P of a tile, times p_scale, split into parts. With one part, P is also multiplied by `factor`, a power
  /// of two.
  __device__ void exponentiate(ScoreFragments<c>& p, const Scores<c>& s,
                               const float (&scales_log2)[c.row_tiles][2], float factor) {
    // With one part, p_scale and the factor are added to the exponent: TF32 can spare the digits.
    const int factor_bits = (__float_as_int(factor) >> 23) - 127;
    const float shift = c.parts == 1 ? static_cast<float>(p_scale_log2 + factor_bits) : 0.0f;
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
      const float maxima[2] = {maximum[r][0] - shift, maximum[r][1] - shift};
      float sums[2] = {};
#pragma unroll
      for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // eight keys n / 2 of the step, row half n % 2
          const int half = n % 2;
          const float(&four)[4] = s[r][2 * step + n / 2];
          const float low = exp2_approx(fmaf(four[2 * half], scales_log2[r][half], -maxima[half]));
          const float high = exp2_approx(fmaf(four[2 * half + 1], scales_log2[r][half], -maxima[half]));
          sums[half] += low + high;
          if constexpr (c.parts == 1) {
            p[step][r][0][n] = pack<__half>(low, high);
          } else {
            const Pair two = split_two(low * p_scale, high * p_scale);
            p[step][r][0][n] = two.high;
            p[step][r][1][n] = two.low;
          }
        }
      }
      const float back = c.parts == 1 ? power_of_two(-factor_bits) : 1.0f;
      sum[r][0] = fmaf(sums[0], back, sum[r][0]);
      sum[r][1] = fmaf(sums[1], back, sum[r][1]);
    }
  }

  /// The factors that turn products with a K tile into exponents of 2.
  __device__ void find_scales_log2(float (&scales_log2)[c.row_tiles][2], int k_exponent) const {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scales_log2[r][half] = scaled_up_to(scale_log2, -k_exponent - row_exponents[r][half]);
      }
    }
  }

  /// Joins a row's sink to its softmax and writes its LSE. Returns the factor of the row's sum of P·V.
  __device__ float finish_row(int r, int half) {
    constexpr float ln2 = 0.693147180559945f;
    constexpr float ln2_low = 0.693147180559945309417 - static_cast<double>(0.693147180559945f);
    const int row = place.row(r, half);
    const float row_total = row_sum(sum[r][half]) * (c.parts == 1 ? 1 / p_scale : 1.0f);
    if (row >= rows.count()) return 0;
    const float top = maximum[r][half];
    float lse = row_total == 0 ? minus_infinity : fmaf(top, ln2, fmaf(top, ln2_low, logf(row_total)));
    float inverse = row_total == 0 ? 0.0f : 1 / (row_total * p_scale);
    if (call.problem.features.sinks) {
      const auto sink = static_cast<float>(call.sinks.at(rows.queries.b, rows.head(row)));
      if (fmaxf(lse, sink) > minus_infinity) {
        float highest = lse, sink_p;
        const float own = join_sink(sink, highest, sink_p);
        const float total = own + sink_p;
        inverse *= own / total;
        lse = highest + logf(total);
      }
    }
    if (call.lse.wanted && place.column() == 0) *rows.float_of(call.lse, row) = lse;
    return inverse;
  }

  /// Joins sinks, normalises O, and writes O and LSE.
  __device__ void finish() {
    const auto dims = static_cast<int>(call.problem.dim_v);
    const bool pairs = aligned_fours(call.o);
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = place.row(r, half);
        const float inverse = finish_row(r, half);
        if (row >= rows.count()) continue;
        auto* to = rows.float_of(call.o, row);
#pragma unroll
        for (int n = 0; n < c.dim / 8; ++n) {
          const int dim = 8 * n + place.column();
          if (dim >= dims) continue;
          const float first = o.scaled_back(o.sum[r][n][2 * half] * inverse);
          const float second = o.scaled_back(o.sum[r][n][2 * half + 1] * inverse);
          if (pairs && dim + 2 <= dims) {
            *reinterpret_cast<float2*>(to + dim) = {first, second};
          } else {
            to[dim] = first;
            if (dim + 1 < dims) to[dim + 1] = second;
          }
        }
      }
    }
  }
};

}  // namespace tilewise::cuda::mma_f32
