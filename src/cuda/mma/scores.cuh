#pragma once

#include "cuda/mma/query_rows.cuh"
#include "cuda/mma/softmax.cuh"

namespace tilewise::cuda::mma {

// Between a product q·k and its weight: what hides pairs, and in the general kernel all else that makes a
// score.

/// Where a lane stands in its warp's fragments, and the warp among the block's rows.
template <auto c>
struct Place {
  int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // one number to the compiler
  int lane = static_cast<int>(threadIdx.x) % 32;

  __device__ int first_row() const { return warp * c.warp_rows(); }
  __device__ int row(int tile, int half) const { return first_row() + 16 * tile + 8 * half + lane / 4; }
  __device__ int column() const { return 2 * (lane % 4); }  // the first of two, of every eight
};

/// Hides what the band hides, and what is past the tile: all there is to do in plain kernels, and only at the
/// band's edge.
template <auto c>
__device__ __forceinline__ void hide(const AttentionCall& call, const QueryRows& rows, const KeyTile& keys,
                                     const Place<c>& place, Scores<c>& s) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t i = rows.queries.first + rows.query(place.row(r, half));
      const KeyRange range = call.keys_of(rows.queries.sequence, i);
      const int first = static_cast<int>(range.first - keys.first) - place.column();
      const int last = min(static_cast<int>(range.last - keys.first), keys.count) - place.column();
#pragma unroll
      for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * n + e < first || 8 * n + e >= last) s[r][n][2 * half + e] = minus_infinity;
        }
      }
    }
  }
}

/// Which of keys j and j + 1 of a query dropout keeps, as two bits.
__device__ __forceinline__ unsigned kept_of_two(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                                std::int64_t i, std::int64_t j) {
  if (j % 2 == 0) {  // then both share a draw
    const DropoutFactors four(call, b, h, i, j);
    const bool later = j % 4 != 0;
    return ((later ? four.factor[2] : four.factor[0]) != 0 ? 1u : 0u) |
           ((later ? four.factor[3] : four.factor[1]) != 0 ? 2u : 0u);
  }
  return (dropout_factor(call, b, h, i, j) != 0 ? 1u : 0u) |
         (dropout_factor(call, b, h, i, j + 1) != 0 ? 2u : 0u);
}

/// Products to scores by way of shared memory, `own_smem`, where a loop can reach them: the code for a pair,
/// with all it may have to do, is there four times and not once for each score. A lane has a column of its
/// own, [scores / 4, 32] of four. A bit of the result says that dropout keeps the pair.
template <ForwardConfig c>
__device__ __forceinline__ std::uint64_t finish_scores(const AttentionCall& call, ScoreRules rules,
                                                       const QueryRows& rows, const KeyTile& keys, bool edge,
                                                       const Place<c>& place, float4* own_smem,
                                                       Scores<c>& s) {
  static_assert(c.scores() <= 64, "a bit each");
  constexpr int eights = c.keys / 8;
  const QueryTile& queries = rows.queries;
  const bool dropout = call.problem.features.dropout;
  if (!rules.softcap && !rules.alibi && !rules.mask && !dropout && keys.tile < 0) {
#pragma unroll
    for (int n = 0; n < c.scores(); ++n) s[n / (4 * eights)][n / 4 % eights][n % 4] *= rules.scale;
    if (edge) hide<c>(call, rows, keys, place, s);
    return 0;
  }
#pragma unroll
  for (int n = 0; n < c.scores() / 4; ++n) {
    const float(&four)[4] = s[n / eights][n % eights];
    own_smem[32 * n] = {four[0], four[1], four[2], four[3]};
  }
  std::uint64_t kept = 0;
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
    std::int64_t i[2], h[2];
    float slope[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(place.row(r, half), rows.count() - 1);
      i[half] = queries.first + rows.query(row);
      h[half] = rows.head(row);
      slope[half] = rules.alibi && rows.heads > 1
                        ? static_cast<float>(call.alibi_slopes.at(queries.b, h[half]))
                        : rules.slope;
    }
#pragma unroll 1
    for (int n = 0; n < eights; ++n) {  // a lane meets what it stored itself
      float4& own = own_smem[32 * (r * eights + n)];
      float four[4] = {own.x, own.y, own.z, own.w};
      const std::int64_t first = keys.first + 8 * n + place.column();
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int half = e / 2;
        const std::int64_t j = first + e % 2;
        rules.slope = slope[half];
        float tangent;
        four[e] =
            edge && hidden(call, queries.sequence, keys, i[half], j)
                ? minus_infinity
                : score_of(call, rules, queries.sequence, queries.b, h[half], i[half], j, four[e], tangent);
      }
      own = {four[0], four[1], four[2], four[3]};
      if (dropout) {
        const unsigned two = kept_of_two(call, queries.b, h[0], i[0], first);
        const unsigned other_two = kept_of_two(call, queries.b, h[1], i[1], first);
        kept |= static_cast<std::uint64_t>(two | other_two << 2) << (4 * (r * eights + n));
      }
    }
  }
#pragma unroll
  for (int n = 0; n < c.scores() / 4; ++n) {
    const float4 four = own_smem[32 * n];
    float(&to)[4] = s[n / eights][n % eights];
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  }
  return kept;
}

/// Makes the weights of one step of 16 keys that dropout does not keep 0. The factor of the others is joined
/// at the end, so that they stay the numbers whose sum they are divided by.
template <ForwardConfig c>
__device__ __forceinline__ void drop(Weights<c>& weights, int step, std::uint64_t kept) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int first = r * (c.keys / 2) + (2 * step + n / 2) * 4 + n % 2 * 2;
      const auto two = static_cast<unsigned>(kept >> first);
      weights[r][n] &= ((two & 1) != 0 ? 0xFFFFu : 0u) | ((two & 2) != 0 ? 0xFFFF0000u : 0u);
    }
  }
}

}  // namespace tilewise::cuda::mma
