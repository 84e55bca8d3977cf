#pragma once

#include "cuda/attention/sm80/backward_f32/block.cuh"
#include "cuda/ptx/reduce.cuh"

namespace tilewise::cuda::mma_f32 {

// What goes to dq, dk and dv.

/// The warp's part of dq += dscores · k, which is 16 queries and some dims. Score gradients are times
/// 2^exponent. Head dims are multiples of 4.
template <auto c>
__device__ __forceinline__ void add_dq(const BackwardBlock<c>& block, const QueriesAt& at, int exponent) {
  constexpr int dim_warps = c.warps / 2;
  constexpr int count = c.dim / dim_warps / 16;
  const int half = block.warp % 2;
  const int first_step = block.warp / 2 * count;  // of 16 dims
  float sum[count][2][4] = {};
  const auto pairs = MatrixPointer<c.keys>::by_columns(block.address(block.pairs_smem));
#pragma unroll 1
  for (int tile = 0; tile < c.own_tiles(); ++tile) {
    if (block.first_key + tile * c.keys >= block.sequence.length_k) break;
    const auto k = MatrixPointer<c.dim>::by_rows(block.address(block.k_smem + tile * c.tile_bytes()));
    const float factor = block.factors_smem[tile];
    float part[count][1][2][4];
    Parts<c> a[c.keys / 16][1];
    Parts<c> from[c.keys / 16][count];
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
      for (int p = 0; p < c.parts; ++p) {
        load_matrices_turned(a[step][0][p],
                             pairs.at(tile * c.keys + 16 * step, half) + p * c.pair_part_bytes());
#pragma unroll
        for (int n = 0; n < count; ++n) {
          load_matrices_turned(from[step][n][p], k.at(16 * step, first_step + n) + p * c.part_bytes());
        }
      }
    }
    add_products(part, a, from, true);
#pragma unroll
    for (int n = 0; n < count * 8; ++n) {
      float& to = sum[n / 8][n / 4 % 2][n % 4];
      to = fmaf(part[n / 8][0][n / 4 % 2][n % 4], factor, to);
    }
  }
  // In two steps, since one factor might be too large or too small.
  const int scaled = exponent + block.least_k_exponent;
  const float first_factor = power_of_two(-scaled / 2) * static_cast<float>(block.call.scale);
  const float second_factor = power_of_two(scaled / 2 - scaled);
  const auto dims = static_cast<int>(block.call.problem.dim_qk);
  const bool even = block.lane % 2 == 0;
  const int first_row = at.first + 16 * half + block.lane / 4;
  auto* to = reinterpret_cast<float*>(block.call.dq.at(block.b, at.hq, block.sequence.first_q + first_row));
#pragma unroll
  for (int n = 0; n < count; ++n) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Of two neighbours each takes four consecutive dims: the first those of the first fragment.
      const float* low = sum[n][0] + 2 * row;
      const float* high = sum[n][1] + 2 * row;
      const float other_first = __shfl_xor_sync(~0u, even ? high[0] : low[0], 1);
      const float other_second = __shfl_xor_sync(~0u, even ? high[1] : low[1], 1);
      const float four[4] = {even ? low[0] : other_first, even ? low[1] : other_second,
                             even ? other_first : high[0], even ? other_second : high[1]};
      const int dim = 16 * (first_step + n) + (even ? 0 : 8) + block.lane % 4 / 2 * 4;
      if (first_row + 8 * row >= block.sequence.length_q || dim >= dims) continue;
      const auto scaled_back = [&](int e) { return four[e] * first_factor * second_factor; };
      add_4(to + 8 * row * block.call.dq.stride_s + dim,
            {scaled_back(0), scaled_back(1), scaled_back(2), scaled_back(3)});
    }
  }
}

/// Writes the warp's rows of dk or dv.
template <auto c>
__device__ __forceinline__ void store(const BackwardBlock<c>& block, const Rows& rows,
                                      const ScaledSum<c>& from, int dims, float factor) {
  if (!rows.wanted) return;
  const bool pairs = aligned_fours(rows);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t j = block.first_key + block.warp * 16 + 8 * half + block.lane / 4;
    if (j >= block.sequence.length_k) continue;
    auto* to = reinterpret_cast<float*>(rows.at(block.b, block.h, block.sequence.first_k + j));
#pragma unroll
    for (int n = 0; n < c.dim / 8; ++n) {
      const int dim = 8 * n + 2 * (block.lane % 4);
      if (dim >= dims) continue;
      const float first = from.scaled_back(from.sum[0][n][2 * half] * factor);
      const float second = from.scaled_back(from.sum[0][n][2 * half + 1] * factor);
      if (pairs && dim + 2 <= dims) {
        *reinterpret_cast<float2*>(to + dim) = {first, second};
      } else {
        to[dim] = first;
        if (dim + 1 < dims) to[dim + 1] = second;
      }
    }
  }
}

/// Adds them to what other blocks add. Head dims are multiples of 4.
template <auto c>
__device__ __forceinline__ void add(const BackwardBlock<c>& block, const Rows& rows, const ScaledSum<c>& from,
                                    int dims, float factor) {
  if (!rows.wanted) return;
  // Two neighbours have two dims each of the same two rows: each takes all four of one.
  const bool even = block.lane % 2 == 0;
  const std::int64_t j = block.first_key + block.warp * 16 + (even ? 0 : 8) + block.lane / 4;
  const bool present = j < block.sequence.length_k;
  auto* to = reinterpret_cast<float*>(
      rows.at(block.b, block.h, block.sequence.first_k + (present ? j : block.first_key)));
#pragma unroll
  for (int n = 0; n < c.dim / 8; ++n) {
    const float(&own)[4] = from.sum[0][n];
    const float first = __shfl_xor_sync(~0u, even ? own[2] : own[0], 1);
    const float second = __shfl_xor_sync(~0u, even ? own[3] : own[1], 1);
    const int dim = 8 * n + block.lane % 4 / 2 * 4;
    if (!present || dim >= dims) continue;
    const auto scaled_back = [&](float x) { return from.scaled_back(x * factor); };
    add_4_of_any_size(to + dim, {scaled_back(even ? own[0] : first), scaled_back(even ? own[1] : second),
                                 scaled_back(even ? first : own[2]), scaled_back(even ? second : own[3])});
  }
}

template <auto c>
__device__ __forceinline__ void finish(const BackwardBlock<c>& block, const Rows& rows,
                                       const ScaledSum<c>& sum, std::int64_t dims, float factor, bool alone) {
  alone ? store(block, rows, sum, static_cast<int>(dims), factor)
        : add(block, rows, sum, static_cast<int>(dims), factor);
}

}  // namespace tilewise::cuda::mma_f32
