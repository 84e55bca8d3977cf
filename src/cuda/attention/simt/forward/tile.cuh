#pragma once

#include "cuda/attention/common/key_tiles.cuh"
#include "cuda/attention/simt/multiply.cuh"

namespace tilewise::cuda::simt {

/// What a configuration says: the warps, the rows of lanes in each, what a lane holds, and how many groups of
/// warps there are: each has all queries and its share of a tile's keys, and their results are joined.
template <int warps, int lane_rows, int queries_each, int keys_each, int dims_each, int blocks_,
          int groups_ = 1>
struct ForwardConfig {
  // Interleaved for few queries, which is where it is faster: at S 256 on an H200 by 6 % at D 64, and by 9 %
  // at D 128 when causal (docs/ladder.md). With more blocks than one for every multiprocessor it makes little
  // difference, or is slower by 1 %.
  using Lanes = cuda::Lanes<lane_rows, warps / groups_ * lane_rows * queries_each <= 64>;
  static constexpr int R = Lanes::rows;
  static constexpr int C = Lanes::columns;
  static constexpr int M = queries_each;
  static constexpr int N = keys_each;
  static constexpr int V = dims_each;
  static constexpr int threads = warps * 32;
  static constexpr int blocks = blocks_;  // a multiprocessor, at least
  static constexpr int groups = groups_;
  static constexpr int group_warps = warps / groups;
  static constexpr int warp_queries = R * M;  // of a warp
  static constexpr int queries = group_warps * warp_queries;
  static constexpr int group_keys = C * N;
  static constexpr int keys = groups * group_keys;
  static constexpr int dim = C * V;           // of a piece of D, and of a piece of Dv
  static constexpr int row_stride = dim + 4;  // of queries as loaded, and of keys
  static constexpr int p_stride =
      warp_queries + 4;  // lanes that store weights of several keys meet in few banks
  static constexpr int q_floats = dim * queries;                  // [dim, queries]: transposed
  static constexpr int k_floats = keys * row_stride;              // [keys, dim]
  static constexpr int v_floats = keys * dim;                     // [keys, dim]
  static constexpr int p_floats = warps * group_keys * p_stride;  // a warp: [group_keys, warp_queries]
  static constexpr std::size_t shared_bytes = sizeof(float) * (q_floats + k_floats + v_floats + p_floats);
  static_assert(queries * row_stride <= v_floats + p_floats,
                "queries are loaded where values and weights go");
  static_assert(groups <= 2 && (groups == 1 || group_warps * 32 * M * (V + 2) <= k_floats),
                "a group hands its results on where keys were");
};

/// Whether it can take D in pieces: queries are loaded where values go, and sums wait where weights go.
template <typename C>
inline constexpr bool takes_pieces = C::queries * C::row_stride <= C::v_floats;

/// Dims to 64 and beyond. The smaller ones are for problems with too few queries to fill the GPU, for GPUs
/// with less shared memory, and, the last, for D in pieces.
using Wide64 = ForwardConfig<4, 4, 8, 8, 8, 2>;
using Half64 = ForwardConfig<4, 4, 4, 8, 8, 3>;
using Small64 = ForwardConfig<4, 2, 4, 4, 4, 2>;
using Wide128 = ForwardConfig<8, 2, 8, 4, 8, 1>;
using Long128 = ForwardConfig<8, 2, 8, 6, 8, 1>;
using Half128 = ForwardConfig<8, 2, 8, 4, 8, 1, 2>;
using Lean128 = ForwardConfig<4, 2, 8, 4, 8, 1>;
using Small128 = ForwardConfig<4, 2, 4, 4, 8, 1>;

/// Where a thread stands.
template <typename C>
struct ForwardPlace {
  typename C::Lanes lane;
  int warp = static_cast<int>(threadIdx.x) / 32;
  int group = warp / C::group_warps;

  __device__ int first_query() const { return warp % C::group_warps * C::warp_queries; }
  // The group's share of a tile.
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
