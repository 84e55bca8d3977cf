#pragma once

#include "cuda/attention/common/backward/row_states.h"
#include "cuda/attention/common/key_grid.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/multiply.cuh"
#include "cuda/attention/simt/shared_tile.cuh"
#include "cuda/runtime/device.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

// What every gradient needs: weights and score gradients of a tile of queries by a tile of keys, recomputed.
// One side is `own`, kept by the block; the other passes by. Either may be the queries.
//
// The warps of a block come in two halves that do the same to different operands: one multiplies q·kᵀ while
// the other multiplies d_o·vᵀ; the first makes weights of its products, the second score gradients; and then,
// in backward/fused.cu, one sums dv while the other sums dk. So a lane has one block of results, 8 x 8
// where rows have 64 dims, where it would need two.

template <int dim_, int tile_>
struct BackwardConfig {
  static constexpr int dim = dim_;    // of a piece of D or Dv
  static constexpr int tile = tile_;  // queries, and keys
  static constexpr int half_warps = dim / 32;
  static constexpr int threads = 2 * half_warps * 32;
  static constexpr int blocks = dim == 64 ? 2 : 1;  // a multiprocessor
  static constexpr int R = 4;                       // rows of lanes in a warp
  static constexpr int C = 8;
  static constexpr int M = tile / (half_warps * R);  // rows of a lane in a product of tiles
  static constexpr int N = tile / C;
  static constexpr int own_each = tile / (2 * R);  // rows of a lane in dk or dv, of eight dims each
  static constexpr int row_stride = dim + 4;
  static constexpr int pair_stride = tile + 8;  // then lanes that store their own pairs meet in no bank
  static constexpr int row_floats = tile * row_stride;
  static constexpr int pair_floats = tile * pair_stride;
  static constexpr std::size_t shared_bytes = sizeof(float) * (4 * row_floats + 2 * pair_floats + 3 * tile);
};

using Narrow = BackwardConfig<64, 64>;  // dims to 64
using Broad = BackwardConfig<128, 64>;  // and beyond, in pieces of 128
using Small = BackwardConfig<64, 32>;   // where shared memory or work is too little for these

/// Whether the plain kernels will do. They take rows whole, so that where shared memory has no room for broad
/// tiles, longer rows are for the general ones.
inline bool plain_backward(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  const bool broad = device_properties(problem.device.index).shared_bytes >= Broad::shared_bytes;
  const auto plain = [&](const Rows& rows, std::int64_t dim) {
    return !rows.wanted || (plain_rows(rows, dim) && dim <= (broad ? Broad::dim : Narrow::dim));
  };
  // Row states of a share come from a kernel of their own, which reads f64.
  const bool known_statistics = !problem.piece.wide_statistics || call.delta.wanted;
  return problem.length_q > 1 && !problem.features.needs_more_than_band() && known_statistics &&
         plain(call.q, problem.dim_qk) && plain(call.k, problem.dim_qk) && plain(call.v, problem.dim_v) &&
         plain(call.d_o, problem.dim_v) && plain(call.dq, problem.dim_qk) && plain(call.dk, problem.dim_qk) &&
         plain(call.dv, problem.dim_v);
}

enum class BackwardSize { small, narrow, broad };

inline BackwardSize backward_size(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const DeviceProperties& device = device_properties(context.device.index);
  const bool broad = problem.dim_qk > 64 || problem.dim_v > 64;
  const std::int64_t blocks = problem.batch * problem.heads_kv * KeyGrid::of(call, Narrow::tile).tiles;
  if (device.shared_bytes < (broad ? Broad::shared_bytes : Narrow::shared_bytes)) return BackwardSize::small;
  if (2 * blocks < device.multiprocessors && (!broad || !plain_backward(call))) return BackwardSize::small;
  return broad ? BackwardSize::broad : BackwardSize::narrow;
}

enum class Side { queries, keys };

/// Where a thread stands.
template <typename C>
struct Place {
  Lanes<C::R> lane;
  int warp = static_cast<int>(threadIdx.x) / 32;  // in the block
  bool second = warp >= C::half_warps;            // half
  int in_half = second ? warp - C::half_warps : warp;

  /// Row (of `other`) and column (of `own`) in a product of tiles.
  __device__ int other(int m) const { return in_half * C::R * C::M + in_steps<C::R>(lane.row, m); }
  __device__ int own(int n) const { return in_steps<C::C>(lane.column, n); }
};

/// A block's shared memory and how it is filled. `general` is as in forward/fused.cu.
template <typename C, Side side, bool general>
struct Stage {
  const AttentionCall& call;
  float* own;    // [tile, piece] of q or k
  float* own_v;  // [tile, piece] of d_o or v
  float* other;  // the same of the other side
  float* other_v;
  float* weights;    // [other, own], after dropout
  float* dscores;    // [other, own]
  RowStates states;  // [queries]
  int dim_qk, dim_v, pieces_qk, pieces_v;

  __device__ Stage(const AttentionCall& call_, float* shared)
      : call(call_),
        own(shared),
        own_v(own + C::row_floats),
        other(own_v + C::row_floats),
        other_v(other + C::row_floats),
        weights(other_v + C::row_floats),
        dscores(weights + C::pair_floats),
        states{dscores + C::pair_floats, dscores + C::pair_floats + C::tile,
               dscores + C::pair_floats + 2 * C::tile},
        dim_qk(static_cast<int>(call.problem.dim_qk)),
        dim_v(static_cast<int>(call.problem.dim_v)),
        pieces_qk((dim_qk + C::dim - 1) / C::dim),
        pieces_v((dim_v + C::dim - 1) / C::dim) {}

  /// Whether every row is in shared memory whole.
  __device__ bool whole() const { return !general || (pieces_qk == 1 && pieces_v == 1); }
  __device__ int dims_qk(int piece) const { return max(0, min(C::dim, dim_qk - piece * C::dim)); }
  __device__ int dims_v(int piece) const { return max(0, min(C::dim, dim_v - piece * C::dim)); }

  __device__ void load_queries(const QueryTile& query, int piece, float* to, float* to_v) const {
    load(to, call.q, dim_qk, query.b, query.h, query.sequence.first_q + query.first, query.count, piece);
    load(to_v, call.d_o, dim_v, query.b, query.h, query.sequence.first_q + query.first, query.count, piece);
  }
  __device__ void load_keys(const QueryTile& query, const KeyTile& keys, int piece, float* to,
                            float* to_v) const {
    const std::int64_t h = call.key_head(query.h);
    load(to, call.k, dim_qk, query.b, h, query.sequence.first_k + keys.first, keys.count, piece);
    load(to_v, call.v, dim_v, query.b, h, query.sequence.first_k + keys.first, keys.count, piece);
  }
  __device__ void load_own(const QueryTile& query, const KeyTile& keys, int piece) const {
    side == Side::queries ? load_queries(query, piece, own, own_v)
                          : load_keys(query, keys, piece, own, own_v);
  }
  __device__ void load_other(const QueryTile& query, const KeyTile& keys, int piece) const {
    side == Side::queries ? load_keys(query, keys, piece, other, other_v)
                          : load_queries(query, piece, other, other_v);
  }
  __device__ void load_states(const QueryTile& query, const RowStates& all) const {
    const int r = static_cast<int>(threadIdx.x);
    if (r >= C::tile) return;
    if (r >= query.count) {
      states.set(r, RowState::unseen());
      return;
    }
    const std::int64_t row = query.h * call.rows_q() + call.first_row_q(query.b) + query.first + r;
    copy_async_4(states.top + r, all.top + row);
    copy_async_4(states.inverse + r, all.inverse + row);
    copy_async_4(states.shift + r, all.shift + row);
  }

 private:
  __device__ static void load(float* to, const Rows& rows, int dim, std::int64_t b, std::int64_t h,
                              std::int64_t row, int valid, int piece) {
    const int first = piece * C::dim;
    if (first >= dim) return;
    load_rows<general, C::tile, C::dim, C::row_stride, C::threads>(to, RowAddress(rows, dim, b, h, row), 0,
                                                                   valid, first, min(C::dim, dim - first));
  }
};

/// A weight before it is divided by the sum. Scores come rounded, as row_states met them: of the highest the
/// weight is 1 to the last bit.
__device__ __forceinline__ float weight_of(float s, float top) { return exp2_approx((s - top) * log2e); }

/// Products to weights, by the first half. Of a query that saw nothing all are 0.
template <typename C, Side side, bool general>
__device__ __forceinline__ void store_weights(const Stage<C, side, general>& stage, const ScoreRules& rules,
                                              const QueryTile& query, const KeyTile& keys, bool edge,
                                              const Place<C>& place, const float (&products)[C::M][C::N]) {
  const AttentionCall& call = stage.call;
  constexpr int queries_each = side == Side::queries ? C::N : C::M;
  float top[queries_each], inverse[queries_each];
#pragma unroll
  for (int n = 0; n < queries_each; ++n) {
    top[n] = stage.states.top[side == Side::queries ? place.own(n) : place.other(n)];
    inverse[n] = stage.states.inverse[side == Side::queries ? place.own(n) : place.other(n)];
  }
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      const int q = side == Side::queries ? n : m;
      stage.weights[place.other(m) * C::pair_stride + place.own(n)] =
          weight_of(__fmul_rn(products[m][n], rules.scale), top[q]) * inverse[q];
    }
  }
  if (!edge) return;
#pragma unroll 1
  for (int n = 0; n < queries_each; ++n) {
    const int r = side == Side::queries ? place.own(n) : place.other(n);
    const KeyRange range = call.keys_of(query.sequence, query.first + r);
    const int first = static_cast<int>(range.first - keys.first);
    const int last = min(static_cast<int>(range.last - keys.first), keys.count);
#pragma unroll 1
    for (int m = 0; m < C::M * C::N / queries_each; ++m) {
      const int c = side == Side::queries ? place.other(m) : place.own(m);
      float& weight =
          stage.weights[(side == Side::queries ? c : r) * C::pair_stride + (side == Side::queries ? r : c)];
      if (c < first || c >= last) weight = 0;
    }
  }
}

/// The same in the general kernel, by way of shared memory, where a loop can reach the pairs: the code for
/// one, with all it may have to do, is there once. Leaves the weight before dropout, times the slope of the
/// softcap where `through_softcap`, in `dscores`.
template <typename C, Side side, bool general>
__device__ __forceinline__ void store_general_weights(const Stage<C, side, general>& stage,
                                                      const ScoreRules& rules, const QueryTile& query,
                                                      const KeyTile& keys, bool edge, bool through_softcap,
                                                      const Place<C>& place,
                                                      const float (&products)[C::M][C::N]) {
  const AttentionCall& call = stage.call;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      stage.weights[place.other(m) * C::pair_stride + place.own(n)] = products[m][n];
    }
  }
  __syncwarp();  // the warp's products are there
  const bool drawn_in_fours =
      call.problem.features.dropout && side == Side::keys && DropoutFactors::share_counters(call, keys.first);
  constexpr int warp_rows = C::R * C::M;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x) % 32; index < warp_rows * C::tile / 4; index += 32) {
    const int row = place.in_half * warp_rows + index % warp_rows;
    const int first = index / warp_rows * 4;
    float weight[4], sloped[4];
    float factor[4] = {1, 1, 1, 1};
    if (drawn_in_fours) {
      const DropoutFactors drawn(call, query.b, query.h, query.first + row, keys.first + first);
#pragma unroll
      for (int n = 0; n < 4; ++n) factor[n] = drawn.factor[n];
    }
    const float4 four = load_four(stage.weights + row * C::pair_stride + first);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int r = side == Side::queries ? first + n : row;
      const int c = side == Side::queries ? row : first + n;
      const std::int64_t i = query.first + r;
      const std::int64_t j = keys.first + c;
      weight[n] = sloped[n] = 0;
      if (stage.states.inverse[r] == 0 || (edge && hidden(call, query.sequence, keys, i, j))) continue;
      float tangent = 0;
      const float s =
          score_of<true>(call, rules, query.sequence, query.b, query.h, i, j, element(four, n), tangent);
      const float p = weight_of(s, stage.states.top[r]) * stage.states.inverse[r];
      if (call.problem.features.dropout && !drawn_in_fours) {
        factor[n] = dropout_factor<true>(call, query.b, query.h, i, j);
      }
      weight[n] = p * factor[n];
      sloped[n] = through_softcap && rules.softcap ? p * (1 - tangent * tangent) : p;
    }
    const int at = row * C::pair_stride + first;
    *reinterpret_cast<float4*>(stage.weights + at) = {weight[0], weight[1], weight[2], weight[3]};
    *reinterpret_cast<float4*>(stage.dscores + at) = {sloped[0], sloped[1], sloped[2], sloped[3]};
  }
}

/// d_o·v to score gradients, by the second half. Returns the highest weight that the lane met.
template <typename C, Side side, bool general>
__device__ __forceinline__ float store_score_gradients(const Stage<C, side, general>& stage,
                                                       const Place<C>& place,
                                                       const float (&dweights)[C::M][C::N]) {
  const AttentionCall& call = stage.call;
  const bool dropout = general && call.problem.features.dropout;
  const float keep_scale = dropout ? call.dropout.keep_scale : 1.0f;
  float shift[side == Side::queries ? C::N : C::M];
  float highest = 0;
#pragma unroll
  for (int n = 0; n < (side == Side::queries ? C::N : C::M); ++n) {
    shift[n] = stage.states.shift[side == Side::queries ? place.own(n) : place.other(n)];
  }
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    float weight[C::N], sloped[C::N];  // a row is read before it is written: a load does not wait for a store
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      const int at = place.other(m) * C::pair_stride + place.own(n);
      weight[n] = stage.weights[at];
      highest = fmaxf(highest, weight[n]);
      sloped[n] = general ? stage.dscores[at] : weight[n];
    }
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      const float dweight = dropout && weight[n] == 0 ? 0.0f : __fmul_rn(dweights[m][n], keep_scale);
      stage.dscores[place.other(m) * C::pair_stride + place.own(n)] =
          sloped[n] * (dweight + shift[side == Side::queries ? n : m]);
    }
  }
  return highest;
}

/// q·kᵀ in the first half, d_o·vᵀ in the second, from the tiles of both sides. These are loaded and awaited
/// here unless rows are whole; then they must be there.
template <typename C, Side side, bool general>
__device__ __forceinline__ void multiply_pairs(const Stage<C, side, general>& stage, const QueryTile& query,
                                               const KeyTile& keys, const Place<C>& place,
                                               float (&products)[C::M][C::N]) {
  const ByRows<C::row_stride, C::R> other{(place.second ? stage.other_v : stage.other) +
                                          place.other(0) * C::row_stride};
  const ByRows<C::row_stride, C::C> own{(place.second ? stage.own_v : stage.own) +
                                        place.own(0) * C::row_stride};
  const auto multiply = [&](int piece, float(&sum)[C::M][C::N]) {
    const int dims = place.second ? stage.dims_v(piece) : stage.dims_qk(piece);
    const int depth = (dims + 7) / 8 * 8;
    if constexpr (general && sums_in_runs<C>) {
      multiply_in_runs(sum, other, own, depth, [](auto& part, const auto& a, const auto& b, int run) {
        multiply_rows(part, a, b, run);
      });
    } else {
      multiply_rows(sum, other, own, depth);
    }
  };
  if (stage.whole()) return multiply(0, products);
  // Each piece is summed by itself, and the pieces in shared memory, where the results will go.
  float* sums = place.second ? stage.dscores : stage.weights;
#pragma unroll 1
  for (int piece = 0; piece < max(stage.pieces_qk, stage.pieces_v); ++piece) {
    __syncthreads();  // everyone is done with the last piece
    stage.load_own(query, keys, piece);
    stage.load_other(query, keys, piece);
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // the piece is there
    float part[C::M][C::N] = {};
    multiply(piece, part);
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int n = 0; n < C::N; ++n) {
        float& sum = sums[place.other(m) * C::pair_stride + place.own(n)];
        sum = products[m][n] = piece == 0 ? part[m][n] : sum + part[m][n];
      }
    }
  }
  __syncthreads();  // everyone is done with the sums
}

/// Whether some pair of the tiles is hidden by band, lengths or block mask.
template <typename C>
__device__ __forceinline__ bool has_edge(const AttentionCall& call, const QueryTile& query,
                                         const KeyTile& keys) {
  const KeyRange all = query.all(call);
  return keys.first < all.first || keys.first + C::tile > all.last || keys.count < C::tile || keys.tile >= 0;
}

/// Fills weights and dscores. When it is done weights are there for all; score gradients, which the second
/// half makes, after the next barrier of the block. A lane of the second half may look at its pairs before:
/// `look` is given the highest weight of them.
template <typename C, Side side, bool general, typename Look>
__device__ __forceinline__ void differentiate(const Stage<C, side, general>& stage, const ScoreRules& rules,
                                              const QueryTile& query, const KeyTile& keys,
                                              bool through_softcap, const Place<C>& place, const Look& look) {
  float products[C::M][C::N] = {};
  multiply_pairs(stage, query, keys, place, products);
  if (!place.second) {
    const bool edge = has_edge<C>(stage.call, query, keys);
    if constexpr (general) {
      store_general_weights(stage, rules, query, keys, edge, through_softcap, place, products);
    } else {
      store_weights(stage, rules, query, keys, edge, place, products);
    }
  }
  __syncthreads();  // weights are there
  if (place.second) look(store_score_gradients(stage, place, products));
}

}  // namespace tilewise::cuda::simt
