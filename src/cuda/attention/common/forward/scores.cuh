#pragma once

#include "cuda/attention/common/accumulator.cuh"
#include "cuda/attention/common/forward/query_rows.cuh"

namespace tilewise::cuda::mma {

// From a product q·k to P: the band, which hides scores and whole tiles from a warp. All other score rules
// are in the general kernel's general_scores.cuh.

// S and O in the registers of mma.sync. A lane has rows g and g + 8 of each row tile, and columns 8n + 2t and
// 8n + 2t + 1 of each row; four neighbouring lanes share a row.

/// By row tile, eight columns, and element of the fragment.
template <auto c>
using Scores = float[c.row_tiles][c.keys / 8][4];
template <auto c>
using Output = float[c.row_tiles][c.dim / 8][4];

/// The position of a lane in its warp's fragments, and of the warp among the CTA's rows.
template <auto c>
struct Place {
  int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // uniform for the compiler
  int lane = static_cast<int>(threadIdx.x) % 32;

  __device__ int first_row() const { return warp * c.warp_rows(); }
  __device__ int row(int tile, int half) const { return first_row() + 16 * tile + 8 * half + lane / 4; }
  __device__ int column() const { return 2 * (lane % 4); }  // the first of two, in every eight
};

/// The keys that some query of the warp sees; none for a warp past the last query. `warp` has `call`, `rows`
/// and `place`.
template <auto c, typename Warp>
inline __device__ KeyRange seen_by_warp(const Warp& warp) {
  const QueryTile& queries = warp.rows.queries;
  const int last = min(warp.place.first_row() + c.warp_rows(), warp.rows.count()) - 1;
  if (warp.place.first_row() > last) return {};
  return {warp.call.keys_of(queries.sequence, queries.first + warp.rows.query(warp.place.first_row())).first,
          warp.call.keys_of(queries.sequence, queries.first + warp.rows.query(last)).last};
}

/// Hides what is outside the band or past the tile's last key. Plain kernels need nothing else, and need this
/// only at the band's edge. `own` is the lane's first key in the tile.
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
