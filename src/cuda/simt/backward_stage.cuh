#pragma once

#include "cuda/tile/gradient_tile.cuh"

namespace tilewise::cuda::simt {

// What the kernels of backward share: the configuration, the tiles in shared memory, and the recomputation of
// weights and score gradients from them.

template <int rows_, int columns_, int own_each, int other_each, int dims_each>
struct Config {
  using Grid = ThreadGrid<rows_, columns_>;
  static constexpr int M = own_each;
  static constexpr int N = other_each;
  static constexpr int V = dims_each;
  static constexpr int threads = Grid::threads;
  static constexpr int own = rows_ * M;
  static constexpr int other = columns_ * N;
  static constexpr int dim = columns_ * V;  // of a piece of D or Dv
  using OwnTile = SharedTile<dim, 0>;
  using OtherTile = SharedTile<dim, 2>;
  using PairTile = SharedTile<other, 0>;
  static constexpr int own_floats = OwnTile::floats(own);
  static constexpr int other_floats = OtherTile::floats(other);
  static constexpr int pair_floats = PairTile::floats(own);
};

using Narrow = Config<8, 16, 8, 4, 4>;  // dims to 64
using Broad = Config<16, 16, 4, 4, 8>;  // and beyond, in pieces of 128

enum class Side { queries, keys };

template <typename C, Side side>
constexpr std::size_t shared_bytes() {
  const int pairs = side == Side::keys ? 2 : 1;  // weights and score gradients, or the latter alone
  return sizeof(float) * (2 * C::own_floats + 2 * C::other_floats + pairs * C::pair_floats);
}

/// Rows of D (q or k) or of Dv (d_o or v) of one side.
struct Operand {
  const Rows* rows;
  int dim;
  bool aligned;
};

__device__ __forceinline__ Operand operand(const Rows& rows, std::int64_t dim) {
  return {&rows, static_cast<int>(dim), aligned_rows(rows, dim)};
}

template <typename C, typename Tile>
__device__ __forceinline__ void load_queries(const AttentionCall& call, const QueryTile& query,
                                             const Operand& from, int piece, int rows, float* tile) {
  const int first = piece * C::dim;
  load_tile<Tile, C::threads>(
      tile, rows, query.count, first, min(C::dim, from.dim - first), from.rows->dtype, from.aligned,
      [&](int r) { return from.rows->at(query.b, query.h, query.sequence.first_q + query.first + r); });
}

template <typename C, typename Tile>
__device__ __forceinline__ void load_keys(const AttentionCall& call, const QueryTile& query,
                                          const KeyTile& keys, const Operand& from, int piece, int rows,
                                          float* tile) {
  const int first = piece * C::dim;
  const std::int64_t h_kv = query.h / call.group();
  load_tile<Tile, C::threads>(
      tile, rows, keys.count, first, min(C::dim, from.dim - first), from.rows->dtype, from.aligned,
      [&](int r) { return call.key_row(*from.rows, query.sequence, query.b, h_kv, keys.first + r); });
}

/// A block's shared memory and the two sides of the problem.
template <typename C, Side side>
struct Stage {
  const AttentionCall& call;
  float* own;    // [own, piece] of q or k
  float* own_v;  // [own, piece] of d_o or v
  float* other;
  float* other_v;
  float* dscores;  // [own, other]
  float* weights;  // [own, other]; keys' side alone
  Operand q, k, d_o, v;
  int pieces_qk, pieces_v;

  __device__ Stage(const AttentionCall& call_, float* shared)
      : call(call_),
        own(shared),
        own_v(own + C::own_floats),
        other(own_v + C::own_floats),
        other_v(other + C::other_floats),
        dscores(other_v + C::other_floats),
        weights(dscores + C::pair_floats),
        q(operand(call.q, call.problem.dim_qk)),
        k(operand(call.k, call.problem.dim_qk)),
        d_o(operand(call.d_o, call.problem.dim_v)),
        v(operand(call.v, call.problem.dim_v)),
        pieces_qk((q.dim + C::dim - 1) / C::dim),
        pieces_v((v.dim + C::dim - 1) / C::dim) {}

  __device__ void load_own(const QueryTile& query, const KeyTile& keys, int piece, bool values) const {
    if constexpr (side == Side::queries) {
      load_queries<C, typename C::OwnTile>(call, query, values ? d_o : q, piece, C::own,
                                           values ? own_v : own);
    } else {
      load_keys<C, typename C::OwnTile>(call, query, keys, values ? v : k, piece, C::own,
                                        values ? own_v : own);
    }
  }

  __device__ void load_other(const QueryTile& query, const KeyTile& keys, int piece, bool values) const {
    if constexpr (side == Side::queries) {
      load_keys<C, typename C::OtherTile>(call, query, keys, values ? v : k, piece, C::other,
                                          values ? other_v : other);
    } else {
      load_queries<C, typename C::OtherTile>(call, query, values ? d_o : q, piece, C::other,
                                             values ? other_v : other);
    }
  }

  // sum += own · otherᵀ over all of D (or Dv), piece by piece. The first piece of `own` stays when it is the
  // only one.
  __device__ void multiply(const QueryTile& query, const KeyTile& keys, bool values, bool own_is_there,
                           const typename C::Grid& grid, float (&sum)[C::M][C::N]) const {
    const int dim = values ? v.dim : q.dim;
    const int pieces = values ? pieces_v : pieces_qk;
    for (int piece = 0; piece < pieces; ++piece) {
      __syncthreads();  // everyone is done with what these tiles held
      if (!own_is_there || pieces > 1) load_own(query, keys, piece, values);
      load_other(query, keys, piece, values);
      commit_copies();
      wait_copies<0>();
      __syncthreads();  // both tiles are there
      multiply_rows<C::M, C::N, typename C::Grid, typename C::OwnTile, typename C::OtherTile>(
          sum, values ? own_v : own, values ? other_v : other, (min(C::dim, dim - piece * C::dim) + 3) / 4,
          grid);
    }
  }

  // Brings piece `piece` of the other side back where a later one took its place.
  __device__ void reload_other(const QueryTile& query, const KeyTile& keys, int piece, bool values) const {
    const int pieces = values ? pieces_v : pieces_qk;
    if (pieces == 1 || piece >= pieces) return;
    load_other(query, keys, piece, values);
  }
};

/// Products to weights (after dropout) and score gradients of a pair of tiles, in registers.
template <typename C, Side side, bool features>
__device__ __forceinline__ void differentiate_pairs(const Stage<C, side>& stage, const ScoreRules& rules,
                                                    const QueryTile& query, const KeyTile& keys,
                                                    const float* shifts, bool own_is_there,
                                                    bool through_softcap, const typename C::Grid& grid,
                                                    float (&weights)[C::M][C::N],
                                                    float (&dscores)[C::M][C::N]) {
  const AttentionCall& call = stage.call;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; ++n) weights[m][n] = dscores[m][n] = 0;
  }
  stage.multiply(query, keys, false, own_is_there, grid, weights);
  stage.multiply(query, keys, true, own_is_there, grid, dscores);
  constexpr int key_tile = side == Side::keys ? C::own : C::other;
  const KeyRange all = query.all(call);
  const bool edge =
      keys.first < all.first || keys.first + key_tile > all.last || keys.count < key_tile || keys.tile >= 0;
  RowState state[side == Side::queries ? C::M : C::N];
#pragma unroll
  for (int n = 0; n < (side == Side::queries ? C::M : C::N); ++n) {
    state[n] = row_state(call, query, side == Side::queries ? grid.own(n) : grid.other(n), shifts);
  }
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      const int r = side == Side::queries ? grid.own(m) : grid.other(n);
      const int c = side == Side::queries ? grid.other(n) : grid.own(m);
      const PairGradient pair =
          pair_gradient<features>(call, rules, query, keys, edge, r, c, state[side == Side::queries ? m : n],
                                  weights[m][n], dscores[m][n]);
      weights[m][n] = pair.weight;
      dscores[m][n] = through_softcap ? pair.dscore * pair.slope : pair.dscore;
    }
  }
}

/// Registers to a tile [own, other] in shared memory.
template <typename C>
__device__ __forceinline__ void store_pairs(const float (&pairs)[C::M][C::N], float* tile,
                                            const typename C::Grid& grid) {
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; n += 4) {
      *reinterpret_cast<float4*>(tile + C::PairTile::at(grid.own(m), grid.other(n) / 4)) =
          float4{pairs[m][n], pairs[m][n + 1], pairs[m][n + 2], pairs[m][n + 3]};
    }
  }
}

}  // namespace tilewise::cuda::simt
