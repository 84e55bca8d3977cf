#pragma once

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/forward/tile.cuh"

namespace tilewise::cuda::simt {

// What becomes of a warp's products before and after the softmax: masks, and the way through shared memory.

/// Where query r and key c of a warp are in its weights, [keys, warp_queries].
template <typename C>
__device__ __forceinline__ int weight_at(int r, int c) {
  return c * C::p_stride + r;
}

template <typename C>
__device__ __forceinline__ void store_weights(const float (&p)[C::M][C::N], float* p_smem,
                                              const ForwardPlace<C>& place) {
#pragma unroll
  for (int n = 0; n < C::N; ++n) {
#pragma unroll
    for (int m = 0; m < C::M; m += 4) {
      *reinterpret_cast<float4*>(p_smem + weight_at<C>(in_runs<C::R>(place.lane.row, m), place.key(n))) =
          float4{p[m][n], p[m + 1][n], p[m + 2][n], p[m + 3][n]};
    }
  }
}

template <typename C>
__device__ __forceinline__ void load_weights(float (&s)[C::M][C::N], const float* p_smem,
                                             const ForwardPlace<C>& place) {
#pragma unroll
  for (int n = 0; n < C::N; ++n) {
#pragma unroll
    for (int m = 0; m < C::M; m += 4) {
      const float4 four = load_four(p_smem + weight_at<C>(in_runs<C::R>(place.lane.row, m), place.key(n)));
#pragma unroll
      for (int r = 0; r < 4; ++r) s[m + r][n] = element(four, r);
    }
  }
}

/// Hides what the band hides: in the plain kernel all there is between a product and exp2.
template <typename C>
__device__ __forceinline__ void hide(const AttentionCall& call, const QueryTile& query, const KeyTile& keys,
                                     const ForwardPlace<C>& place, float (&s)[C::M][C::N]) {
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const KeyRange range = call.keys_of(query.sequence, query.first + place.query(m));
    const int first = static_cast<int>(range.first - keys.first) - place.lane.column;
    const int last = static_cast<int>(range.last - keys.first) - place.lane.column;
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      if (C::C * n < first || C::C * n >= last) s[m][n] = minus_infinity;
    }
  }
}

/// Products to scores by way of shared memory, where a loop can reach them: the code for a pair, with all it
/// may have to do, is there once.
template <typename C>
__device__ __forceinline__ void finish_scores(const AttentionCall& call, const ScoreRules& rules,
                                              const QueryTile& query, const KeyTile& keys, bool edge,
                                              const ForwardPlace<C>& place, float* p_smem,
                                              float (&s)[C::M][C::N]) {
  store_weights<C>(s, p_smem, place);
#pragma unroll 1
  for (int index = 0; index < C::N * C::M / 4; ++index) {  // a lane meets what it stored itself
    const int n = index / (C::M / 4);
    const int m = index % (C::M / 4) * 4;
    const std::int64_t j = keys.first + place.key(n);
    float4& four =
        *reinterpret_cast<float4*>(p_smem + weight_at<C>(in_runs<C::R>(place.lane.row, m), place.key(n)));
    float lane[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::int64_t i = query.first + min(place.query(m + r), query.count - 1);
      float tangent;
      lane[r] = edge && hidden(call, query.sequence, keys, i, j)
                    ? minus_infinity
                    : score_of<true>(call, rules, query.sequence, query.b, query.h, i, j, lane[r], tangent);
    }
    four = {lane[0], lane[1], lane[2], lane[3]};
  }
  load_weights<C>(s, p_smem, place);
}

/// A lane draws for four keys of a query at a time, which share a random number.
template <typename C>
__device__ __forceinline__ void drop(const AttentionCall& call, const QueryTile& query, const KeyTile& keys,
                                     const ForwardPlace<C>& place, float* p_smem) {
  __syncwarp();  // the warp's weights are there
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x) % 32; index < C::warp_queries * C::group_keys / 4;
       index += 32) {
    const int r = index % C::warp_queries;
    const int c = index / C::warp_queries * 4;
    const std::int64_t i = query.first + place.first_query() + r;
    const std::int64_t j = keys.first + c;
    if (DropoutFactors::share_counters(call, keys.first)) {
      const DropoutFactors drawn(call, query.b, query.h, i, j);
#pragma unroll
      for (int n = 0; n < 4; ++n) p_smem[weight_at<C>(r, c + n)] *= drawn.factor[n];
    } else {
#pragma unroll 1
      for (int n = 0; n < 4; ++n) {
        p_smem[weight_at<C>(r, c + n)] *= dropout_factor<true>(call, query.b, query.h, i, j + n);
      }
    }
  }
}

}  // namespace tilewise::cuda::simt
