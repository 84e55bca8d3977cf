#pragma once

#include "cuda/attention/common/backward/row_states.h"
#include "cuda/attention/common/key_grid.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/multiply.cuh"
#include "cuda/attention/simt/shared_tile.cuh"
#include "cuda/runtime/device.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

// Recomputes P and dS of a tile of queries by a tile of keys, which every gradient needs. The CTA keeps one
// of the two tiles, called `own`, and walks over tiles of the `other` side. Either side may be the queries.
//
// The warps of a CTA form two halves, which run the same code on different operands:
//
//              product    epilogue           then, in backward/fused.cu
//   first      Q·Kᵀ       P, stored          dV += Pᵀ·dO
//   second     dO·Vᵀ      dS, stored         dK += dSᵀ·Q
//
// So a lane holds one accumulator (8 x 8 where rows have 64 dims) where it would need two.

template <int dim_, int tile_>
struct BackwardConfig {
  static constexpr int dim = dim_;    // dims of a piece of D or Dv
  static constexpr int tile = tile_;  // queries of a query tile, and keys of a key tile
  static constexpr int half_warps = dim / 32;
  static constexpr int threads = 2 * half_warps * 32;
  static constexpr int blocks = dim == 64 ? 2 : 1;  // CTAs per SM
  static constexpr int R = 4;                       // a warp is R x C lanes
  static constexpr int C = 8;
  static constexpr int M = tile / (half_warps * R);  // a lane holds M x N elements of S or dP
  static constexpr int N = tile / C;
  static constexpr int own_each = tile / (2 * R);  // a lane's rows of dK or dV, eight dims each
  static constexpr int row_stride = dim + 4;
  static constexpr int pair_stride = tile + 8;  // lanes that store their elements have no bank conflict
  static constexpr int row_floats = tile * row_stride;
  static constexpr int pair_floats = tile * pair_stride;
  static constexpr std::size_t shared_bytes = sizeof(float) * (4 * row_floats + 2 * pair_floats + 3 * tile);
};

using Narrow = BackwardConfig<64, 64>;  // D and Dv up to 64
using Broad = BackwardConfig<128, 64>;  // larger head dims, in pieces of 128
using Small = BackwardConfig<64, 32>;   // for GPUs with little shared memory, and problems with little work

/// Whether the plain kernels take the call. They load whole rows, so a GPU whose shared memory has no room
/// for Broad tiles leaves rows of more than 64 dims to the general kernels.
inline bool plain_backward(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  const bool broad = device_properties(problem.device.index).shared_bytes >= Broad::shared_bytes;
  const auto plain = [&](const Rows& rows, std::int64_t dim) {
    return !rows.wanted || (plain_rows(rows, dim) && dim <= (broad ? Broad::dim : Narrow::dim));
  };
  // Row states of a share of the keys come from another kernel, which reads statistics in f64.
  const bool known_statistics = !problem.piece.wide_statistics || call.delta.wanted;
  return choice_length_q(problem) > 1 && !problem.features.needs_more_than_band() && known_statistics &&
         plain(call.q, problem.dim_qk) && plain(call.k, problem.dim_qk) && plain(call.v, problem.dim_v) &&
         plain(call.d_o, problem.dim_v) && plain(call.dq, problem.dim_qk) && plain(call.dk, problem.dim_qk) &&
         plain(call.dv, problem.dim_v);
}

enum class BackwardSize { small, narrow, broad };

/// `call` is the one whose lengths count (choosing_by()).
inline BackwardSize size_for(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const DeviceProperties& device = device_properties(context.device.index);
  const bool broad = problem.dim_qk > 64 || problem.dim_v > 64;
  const std::int64_t blocks = problem.batch * problem.heads_kv * KeyGrid::of(call, Narrow::tile).tiles;
  if (device.shared_bytes < (broad ? Broad::shared_bytes : Narrow::shared_bytes)) return BackwardSize::small;
  if (2 * blocks < device.multiprocessors && (!broad || !plain_backward(call))) return BackwardSize::small;
  return broad ? BackwardSize::broad : BackwardSize::narrow;
}
inline BackwardSize backward_size(const AttentionCall& call, const Context& context) {
  return choosing_by(call, [&](const AttentionCall& asked) { return size_for(asked, context); });
}

enum class Side { queries, keys };

/// The thread's place in the CTA, and the elements of a [other, own] tile that it holds.
template <typename C>
struct Place {
  Lanes<C::R> lane;
  int warp = static_cast<int>(threadIdx.x) / 32;  // of the CTA
  bool second = warp >= C::half_warps;            // whether the warp is of the second half
  int in_half = second ? warp - C::half_warps : warp;

  /// Row and column of element (m, n): indices into the `other` and the `own` tile.
  __device__ int other(int m) const { return in_half * C::R * C::M + in_steps<C::R>(lane.row, m); }
  __device__ int own(int n) const { return in_steps<C::C>(lane.column, n); }
};

/// A CTA's shared memory and the loads that fill it. `general` has the same meaning as in forward/fused.cu.
template <typename C, Side side, bool general>
struct Stage {
  const AttentionCall& call;
  float* own;    // [tile, piece] of Q or K
  float* own_v;  // [tile, piece] of dO or V
  float* other;  // the same two of the other side
  float* other_v;
  float* p;          // [other, own], after dropout
  float* ds;         // [other, own]
  RowStates states;  // [queries]
  int dim_qk, dim_v, pieces_qk, pieces_v;

  __device__ Stage(const AttentionCall& call_, float* shared)
      : call(call_),
        own(shared),
        own_v(own + C::row_floats),
        other(own_v + C::row_floats),
        other_v(other + C::row_floats),
        p(other_v + C::row_floats),
        ds(p + C::pair_floats),
        states{ds + C::pair_floats, ds + C::pair_floats + C::tile, ds + C::pair_floats + 2 * C::tile},
        dim_qk(static_cast<int>(call.problem.dim_qk)),
        dim_v(static_cast<int>(call.problem.dim_v)),
        pieces_qk((dim_qk + C::dim - 1) / C::dim),
        pieces_v((dim_v + C::dim - 1) / C::dim) {}

  /// Whether a row of D and of Dv is one piece, so that shared memory holds whole rows.
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

/// exp(s − top): an element of P before the division by the row's sum. The score is rounded in the same way
/// as in row_states, so that the largest element is exactly 1.
__device__ __forceinline__ float exponential(float s, float top) { return exp2_approx((s - top) * log2e); }

/// The epilogue of Q·Kᵀ, by the first half: stores P. P is 0 in rows of queries that see no key.
template <typename C, Side side, bool general>
__device__ __forceinline__ void store_p(const Stage<C, side, general>& stage, const ScoreRule& rules,
                                        const QueryTile& query, const KeyTile& keys, bool edge,
                                        const Place<C>& place, const float (&s)[C::M][C::N]) {
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
      stage.p[place.other(m) * C::pair_stride + place.own(n)] =
          exponential(__fmul_rn(s[m][n], rules.scale), top[q]) * inverse[q];
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
      float& p = stage.p[(side == Side::queries ? c : r) * C::pair_stride + (side == Side::queries ? r : c)];
      if (c < first || c >= last) p = 0;
    }
  }
}

/// The same for the general kernel. The accumulator goes through shared memory, where a loop can index its
/// elements, so that the long code for one element is instantiated once. Also stores the factor of dP in dS,
/// in the place of dS: P before dropout, times the derivative of the score rule if `through_rule`.
template <typename C, Side side, bool general>
__device__ __forceinline__ void store_general_p(const Stage<C, side, general>& stage, const ScoreRule& rules,
                                                const QueryTile& query, const KeyTile& keys, bool edge,
                                                bool through_rule, const Place<C>& place,
                                                const float (&s)[C::M][C::N]) {
  const AttentionCall& call = stage.call;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      stage.p[place.other(m) * C::pair_stride + place.own(n)] = s[m][n];
    }
  }
  __syncwarp();  // the warp's products are stored, and other lanes read them below
  const bool drawn_in_fours =
      call.problem.features.dropout && side == Side::keys && DropoutFactors::share_counters(call, keys.first);
  constexpr int warp_rows = C::R * C::M;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x) % 32; index < warp_rows * C::tile / 4; index += 32) {
    const int row = place.in_half * warp_rows + index % warp_rows;
    const int first = index / warp_rows * 4;
    float p_kept[4], ds_factor[4];
    float factor[4] = {1, 1, 1, 1};
    if (drawn_in_fours) {
      const DropoutFactors drawn(call, query.b, query.h, query.first + row, keys.first + first);
#pragma unroll
      for (int n = 0; n < 4; ++n) factor[n] = drawn.factor[n];
    }
    const float4 four = load_four(stage.p + row * C::pair_stride + first);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int r = side == Side::queries ? first + n : row;
      const int c = side == Side::queries ? row : first + n;
      const std::int64_t i = query.first + r;
      const std::int64_t j = keys.first + c;
      p_kept[n] = ds_factor[n] = 0;
      if (stage.states.inverse[r] == 0 || (edge && hidden(call, query.sequence, keys, i, j))) continue;
      float tangent = 0;
      const float score =
          score_of<true>(call, rules, query.sequence, query.b, query.h, i, j, element(four, n), tangent);
      const float p = exponential(score, stage.states.top[r]) * stage.states.inverse[r];
      if (call.problem.features.dropout && !drawn_in_fours) {
        factor[n] = dropout_factor<true>(call, query.b, query.h, i, j);
      }
      p_kept[n] = p * factor[n];
      ds_factor[n] = through_rule ? p * rules.derivative(tangent) : p;
    }
    const int at = row * C::pair_stride + first;
    *reinterpret_cast<float4*>(stage.p + at) = {p_kept[0], p_kept[1], p_kept[2], p_kept[3]};
    *reinterpret_cast<float4*>(stage.ds + at) = {ds_factor[0], ds_factor[1], ds_factor[2], ds_factor[3]};
  }
}

/// The epilogue of dO·Vᵀ, by the second half: stores dS. Returns the largest P among the lane's elements.
template <typename C, Side side, bool general>
__device__ __forceinline__ float store_ds(const Stage<C, side, general>& stage, const Place<C>& place,
                                          const float (&dp)[C::M][C::N]) {
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
    // The whole row is read before it is written, so that no load waits for a store.
    float p[C::N], ds_factor[C::N];
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      const int at = place.other(m) * C::pair_stride + place.own(n);
      p[n] = stage.p[at];
      highest = fmaxf(highest, p[n]);
      ds_factor[n] = general ? stage.ds[at] : p[n];
    }
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      const float dp_kept = dropout && p[n] == 0 ? 0.0f : __fmul_rn(dp[m][n], keep_scale);
      stage.ds[place.other(m) * C::pair_stride + place.own(n)] =
          ds_factor[n] * (dp_kept + shift[side == Side::queries ? n : m]);
    }
  }
  return highest;
}

/// Computes Q·Kᵀ in the first half and dO·Vᵀ in the second. If rows are whole, the tiles must be in shared
/// memory already; otherwise this function loads them piece by piece.
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
  // Each piece has a sum of its own. The total is kept in shared memory, in the place of the results.
  float* sums = place.second ? stage.ds : stage.p;
#pragma unroll 1
  for (int piece = 0; piece < max(stage.pieces_qk, stage.pieces_v); ++piece) {
    __syncthreads();  // all warps have read the last piece, which the loads overwrite
    stage.load_own(query, keys, piece);
    stage.load_other(query, keys, piece);
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // all threads' copies of the piece have arrived
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
  __syncthreads();  // all lanes have read their totals, which P and dS overwrite
}

/// Whether band, lengths or the block mask hide any pair of the two tiles.
template <typename C>
__device__ __forceinline__ bool has_edge(const AttentionCall& call, const QueryTile& query,
                                         const KeyTile& keys) {
  const KeyRange all = query.all(call);
  return keys.first < all.first || keys.first + C::tile > all.last || keys.count < C::tile || keys.tile >= 0;
}

/// Computes P and dS in shared memory. On return all threads may read P, but they may read dS only after the
/// CTA's next barrier, since the second half stores it last. Before that barrier each lane of the second half
/// calls `look` with the largest P among the elements it stored.
template <typename C, Side side, bool general, typename Look>
__device__ __forceinline__ void differentiate(const Stage<C, side, general>& stage, const ScoreRule& rules,
                                              const QueryTile& query, const KeyTile& keys, bool through_rule,
                                              const Place<C>& place, const Look& look) {
  float products[C::M][C::N] = {};
  multiply_pairs(stage, query, keys, place, products);
  if (!place.second) {
    const bool edge = has_edge<C>(stage.call, query, keys);
    if constexpr (general) {
      store_general_p(stage, rules, query, keys, edge, through_rule, place, products);
    } else {
      store_p(stage, rules, query, keys, edge, place, products);
    }
  }
  __syncthreads();  // P is stored, and the second half reads it
  if (place.second) look(store_ds(stage, place, products));
}

}  // namespace tilewise::cuda::simt
