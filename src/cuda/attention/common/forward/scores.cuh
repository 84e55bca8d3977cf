#pragma once

#include "cuda/attention/common/accumulator.cuh"
#include "cuda/attention/common/forward/fragments.cuh"
#include "cuda/attention/common/forward/query_rows.cuh"

namespace tilewise::cuda::mma {

// Between a product q·k and its weight: what hides pairs, and so whole tiles from a warp. All else that makes
// a score is in the general kernel's general_scores.cuh.

/// Where a lane stands in its warp's fragments, and the warp among the block's rows.
template <auto c>
struct Place {
  int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // one number to the compiler
  int lane = static_cast<int>(threadIdx.x) % 32;

  __device__ int first_row() const { return warp * c.warp_rows(); }
  __device__ int row(int tile, int half) const { return first_row() + 16 * tile + 8 * half + lane / 4; }
  __device__ int column() const { return 2 * (lane % 4); }  // the first of two, of every eight
};

/// Keys that some query of the warp sees; a warp past the last query sees none. `warp` has `call`, `rows` and
/// `place`.
template <auto c, typename Warp>
inline __device__ KeyRange seen_by_warp(const Warp& warp) {
  const QueryTile& queries = warp.rows.queries;
  const int last = min(warp.place.first_row() + c.warp_rows(), warp.rows.count()) - 1;
  if (warp.place.first_row() > last) return {};
  return {warp.call.keys_of(queries.sequence, queries.first + warp.rows.query(warp.place.first_row())).first,
          warp.call.keys_of(queries.sequence, queries.first + warp.rows.query(last)).last};
}

/// Hides what the band hides, and what is past the tile: all there is to do in plain kernels, and only at the
/// band's edge. `own` is the lane's first key of the tile.
template <auto c, typename View = MmaView<c.row_tiles, c.keys / 8>>
__device__ __forceinline__ void hide(const AttentionCall& call, const QueryRows& rows, const KeyTile& keys,
                                     const Place<c>& place, int own, Scores<c>& s) {
#pragma unroll
  for (int q = 0; q < View::queries; ++q) {
    const std::int64_t i = rows.queries.first + rows.query(place.row(q / 2, q % 2));
    const KeyRange range = call.keys_of(rows.queries.sequence, i);
    const int first = static_cast<int>(range.first - keys.first) - own;
    const int last = min(static_cast<int>(range.last - keys.first), keys.count) - own;
    hide_outside<View>(s, q, first, last);
  }
}
template <auto c>
__device__ __forceinline__ void hide(const AttentionCall& call, const QueryRows& rows, const KeyTile& keys,
                                     const Place<c>& place, Scores<c>& s) {
  hide<c>(call, rows, keys, place, place.column(), s);
}

}  // namespace tilewise::cuda::mma
