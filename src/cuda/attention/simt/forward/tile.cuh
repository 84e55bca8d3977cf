#pragma once

#include "cuda/attention/common/key_tiles.cuh"
#include "cuda/attention/simt/multiply.cuh"

namespace tilewise::cuda::simt {

/// A configuration: the number of warps, the rows of lanes in a warp, what a lane holds, and the number of
/// groups of warps. Each group has all queries of the CTA and half of a tile's keys if there are two groups;
/// their results are joined at the end.
template <int warps, int lane_rows, int queries_each, int keys_each, int dims_each, int blocks_,
          int groups_ = 1>
struct ForwardConfig {
  // Lanes are interleaved for few queries, where this is faster: at S 256 on an H200 by 6 % at D 64, and by
  // 9 % at D 128 when causal (docs/ladder.md). With more than one CTA per SM it makes little difference, or
  // is slower by 1 %.
  using Lanes = cuda::Lanes<lane_rows, warps / groups_ * lane_rows * queries_each <= 64>;
  static constexpr int R = Lanes::rows;
  static constexpr int C = Lanes::columns;
  static constexpr int M = queries_each;
  static constexpr int N = keys_each;
  static constexpr int V = dims_each;
  static constexpr int threads = warps * 32;
  static constexpr int blocks = blocks_;  // CTAs per SM, at least
  static constexpr int groups = groups_;
  static constexpr int group_warps = warps / groups;
  static constexpr int warp_queries = R * M;  // queries of a warp
  static constexpr int queries = group_warps * warp_queries;
  static constexpr int group_keys = C * N;
  static constexpr int keys = groups * group_keys;
  static constexpr int dim = C * V;                   // dims of a piece of D, and of a piece of Dv
  static constexpr int row_stride = dim + 4;          // of Q as loaded, and of K
  static constexpr int p_stride = warp_queries + 4;   // few bank conflicts between lanes that store P
  static constexpr int q_floats = dim * queries;      // [dim, queries], transposed
  static constexpr int k_floats = keys * row_stride;  // [keys, dim]
  static constexpr int v_floats = keys * dim;         // [keys, dim]
  static constexpr int p_floats = warps * group_keys * p_stride;  // per warp [group_keys, warp_queries]
  static constexpr std::size_t shared_bytes = sizeof(float) * (q_floats + k_floats + v_floats + p_floats);
  static_assert(queries * row_stride <= v_floats + p_floats, "Q is loaded in the place of V and P");
  static_assert(groups <= 2 && (groups == 1 || group_warps * 32 * M * (V + 2) <= k_floats),
                "the second group stores its results in the place of K");
};

/// Whether a configuration can take D in pieces. Then Q is loaded in the place of V, while the place of P
/// holds S summed over the pieces so far.
template <typename C>
inline constexpr bool takes_pieces = C::queries * C::row_stride <= C::v_floats;

/// The configurations for head dims up to 64, and for larger ones. The smaller tiles are for problems with
/// too few queries to fill the GPU and for GPUs with less shared memory. The small ones also take D in
/// pieces.
using Wide64 = ForwardConfig<4, 4, 8, 8, 8, 2>;
using Half64 = ForwardConfig<4, 4, 4, 8, 8, 3>;
using Small64 = ForwardConfig<4, 2, 4, 4, 4, 2>;
using Wide128 = ForwardConfig<8, 2, 8, 4, 8, 1>;
using Long128 = ForwardConfig<8, 2, 8, 6, 8, 1>;
using Half128 = ForwardConfig<8, 2, 8, 4, 8, 1, 2>;
using Lean128 = ForwardConfig<4, 2, 8, 4, 8, 1>;
using Small128 = ForwardConfig<4, 2, 4, 4, 8, 1>;

/// The thread's place in the CTA, and the queries, keys and dims of its elements of S and O.
template <typename C>
struct ForwardPlace {
  typename C::Lanes lane;
  int warp = static_cast<int>(threadIdx.x) / 32;
  int group = warp / C::group_warps;

  __device__ int first_query() const { return warp % C::group_warps * C::warp_queries; }
  // The keys of a tile that are the group's.
  __device__ KeyTile share(const KeyTile& tile) const {
    if constexpr (C::groups == 1) return tile;
    const int before = group * C::group_keys;
    return {tile.first + before, max(0, min(tile.count - before, C::group_keys)), tile.tile};
  }
  __device__ int query(int m) const { return first_query() + in_runs<C::R>(lane.row, m); }
  __device__ int key(int n) const { return in_steps<C::C>(lane.column, n); }
  __device__ int dim(int d) const { return in_runs<C::C>(lane.column, d); }
};

}  // namespace tilewise::cuda::simt
