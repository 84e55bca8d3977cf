#include <array>

#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/simt/fused.h"
#include "cuda/simt/row_gradients.h"
#include "cuda/tile/key_tiles.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace tilewise::cuda::simt {
namespace {

// Online softmax in one kernel. A block keeps a tile of queries and walks over tiles of keys; scores live in
// registers, pass through shared memory once as weights, and never reach global memory. Head dims beyond a
// tile's are met by walking over pieces of D for every tile of keys, and by giving each piece of Dv a block
// of its own.

// What a configuration says: the threads, and what each holds. Both products are outer products of turned
// tiles, so queries, keys and weights lie in shared memory with what is summed over along the rows.
template <int rows_, int columns_, int queries_each, int keys_each, int dims_each, int blocks_>
struct Config {
  using Grid = BlockedGrid<rows_, columns_>;
  static constexpr int M = queries_each;
  static constexpr int N = keys_each;
  static constexpr int V = dims_each;
  static constexpr int threads = Grid::threads;
  static constexpr int blocks = blocks_;  // a multiprocessor, at least
  static constexpr int queries = rows_ * M;
  static constexpr int keys = columns_ * N;
  static constexpr int dim = columns_ * V;  // of a piece of D, and of a piece of Dv
  using QTile = TurnedTile<queries>;        // [dim, queries]
  using KTile = TurnedTile<keys>;           // [dim, keys]
  using PTile = TurnedTile<queries>;        // [keys, queries]
  using VTile = PlainTile<dim>;             // [keys, dim]: as loaded
  using Loaded = SharedTile<dim, 31>;       // [queries or keys, dim]: as loaded
  static constexpr int q_floats = queries * dim;
  static constexpr int k_floats = keys * dim;
  static constexpr int p_floats = keys * queries;
  static constexpr std::size_t shared_bytes = sizeof(float) * (q_floats + 3 * k_floats + p_floats);
  static_assert(q_floats <= k_floats + p_floats, "queries are loaded where values and weights go later");
};

// Dims to 64 and beyond; the small ones when there are too few queries to fill the GPU with the large.
using Wide64 = Config<16, 8, 8, 8, 8, 2>;
using Wide128 = Config<16, 16, 8, 4, 8, 1>;
using Small64 = Config<8, 16, 4, 4, 4, 2>;
using Small128 = Config<8, 16, 4, 4, 8, 1>;

template <typename C>
struct SoftmaxRow {
  float maximum[C::M];  // starts at the lowest finite number: a row that saw nothing needs no special case
  float sum[C::M];      // over this thread's keys alone, until the end
};

// The maximum over the threads of a row, which are neighbours in a warp.
template <typename C>
__device__ __forceinline__ float row_maximum(float x) {
#pragma unroll
  for (int lane = C::Grid::columns / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}
template <typename C>
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int lane = C::Grid::columns / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// Products to scores, hidden ones −inf. Without features a call has nothing but the scale and the band, pays
// for nothing more, and its scores are in units of log2 e, ready for exp2.
template <typename C>
__device__ __forceinline__ void finish_plain_scores(const AttentionCall& call, const ScoreRules& rules,
                                                    const QueryTile& query, const KeyTile& keys, bool edge,
                                                    const typename C::Grid& grid, float (&s)[C::M][C::N]) {
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; ++n) s[m][n] *= rules.scale_log2;
  }
  if (!edge) return;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const KeyRange range = call.keys_of(query.sequence, query.first + grid.own(m));
    const int first = static_cast<int>(range.first - keys.first) - grid.column * 4;
    const int last = static_cast<int>(range.last - keys.first) - grid.column * 4;
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      const int key = n / 4 * 4 * C::Grid::columns + n % 4;
      if (key < first || key >= last) s[m][n] = minus_infinity;
    }
  }
}

template <typename C>
__device__ __forceinline__ void finish_scores(const AttentionCall& call, const ScoreRules& rules,
                                              const QueryTile& query, const KeyTile& keys, bool edge,
                                              const typename C::Grid& grid, float (&s)[C::M][C::N]) {
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const std::int64_t i = query.first + min(grid.own(m), query.count - 1);
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      const std::int64_t j = keys.first + grid.other(n);
      float tangent;
      if (edge && hidden(call, query.sequence, keys, i, j)) {
        s[m][n] = minus_infinity;
      } else {
        s[m][n] = score_of(call, rules, query.sequence, query.b, query.h, i, j, s[m][n], tangent);
      }
    }
  }
}

// e^x of a difference of scores.
template <bool features>
__device__ __forceinline__ float exp_of(float x) {
  return exp2_approx(features ? x * log2e : x);
}

// Scores to weights; o is rescaled when the maximum moved.
template <typename C, bool features>
__device__ __forceinline__ void softmax(float (&s)[C::M][C::N], float (&o)[C::M][C::V], SoftmaxRow<C>& row) {
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    float highest = s[m][0];
#pragma unroll
    for (int n = 1; n < C::N; ++n) highest = fmaxf(highest, s[m][n]);
    const float maximum = fmaxf(row.maximum[m], row_maximum<C>(highest));
    const float rescale = exp_of<features>(row.maximum[m] - maximum);
    row.maximum[m] = maximum;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      s[m][n] = exp_of<features>(s[m][n] - maximum);
      sum += s[m][n];
    }
    row.sum[m] = row.sum[m] * rescale + sum;
#pragma unroll
    for (int d = 0; d < C::V; ++d) o[m][d] *= rescale;
  }
}

template <typename C>
__device__ __forceinline__ void drop(const AttentionCall& call, const QueryTile& query, const KeyTile& keys,
                                     const typename C::Grid& grid, float (&p)[C::M][C::N]) {
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const std::int64_t i = query.first + grid.own(m);
#pragma unroll
    for (int n = 0; n < C::N; n += 4) {
      const std::int64_t j = keys.first + grid.other(n);
      if (keys.first % 4 == 0) {
        const DropoutFactors drawn(call, query.b, query.h, i, j);
#pragma unroll
        for (int k = 0; k < 4; ++k) p[m][n + k] *= drawn.factor[k];
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) p[m][n + k] *= dropout_factor(call, query.b, query.h, i, j + k);
      }
    }
  }
}

template <typename C>
__device__ __forceinline__ void store_weights(const float (&p)[C::M][C::N], float* p_smem,
                                              const typename C::Grid& grid) {
#pragma unroll
  for (int n = 0; n < C::N; ++n) {
#pragma unroll
    for (int m = 0; m < C::M; m += 4) {
      reinterpret_cast<float4*>(p_smem)[C::PTile::chunk(grid.other(n), grid.own(m) / 4)] =
          float4{p[m][n], p[m + 1][n], p[m + 2][n], p[m + 3][n]};
    }
  }
}

// Joins the sink, divides, writes o (and lse, by the blocks of the first piece of Dv).
template <typename C, bool features>
__device__ __forceinline__ void finish(const AttentionCall& call, const QueryTile& query, int first_dim,
                                       const typename C::Grid& grid, float (&o)[C::M][C::V],
                                       SoftmaxRow<C>& row) {
  const int dims = static_cast<int>(call.problem.dim_v) - first_dim;
  const bool aligned = aligned_rows(call.o, call.problem.dim_v);
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const int r = grid.own(m);
    float sum = row_sum<C>(row.sum[m]);
    float maximum = row.maximum[m];
    float factor = 1;
    if (r >= query.count) continue;
    if (call.problem.features.sinks) {
      const float sink = static_cast<float>(call.sinks.at(query.b, query.h)) * (features ? 1.0f : log2e);
      const float highest = fmaxf(maximum, sink);
      // The sink may dwarf every weight, so that all of o hangs on this factor: not the approximate one.
      factor = features ? expf(maximum - highest) : exp2f(maximum - highest);
      sum = sum * factor + (features ? expf(sink - highest) : exp2f(sink - highest));
      maximum = highest;
    }
    const float inverse = sum == 0 ? 0.0f : factor / sum;
    const std::int64_t s = query.sequence.first_q + query.first + r;
    if (call.lse.wanted && first_dim == 0 && grid.column == 0) {
      const float lse = sum == 0 ? minus_infinity : fmaf(maximum, features ? 1.0f : ln2, logf(sum));
      *reinterpret_cast<float*>(call.lse.at(query.b, query.h, s)) = lse;
    }
    std::byte* out = call.o.at(query.b, query.h, s) + first_dim * size_of(call.o.dtype);
#pragma unroll
    for (int d = 0; d < C::V; d += 4) {
      store_chunk(out, call.o.dtype, grid.other(d), dims, aligned,
                  {o[m][d] * inverse, o[m][d + 1] * inverse, o[m][d + 2] * inverse, o[m][d + 3] * inverse});
    }
  }
}

struct Blocks {
  QueryGrid queries;
  int dim_pieces;  // of Dv
};

// The keys a block walks over, and how their rows, and those of its queries, come into shared memory.
template <typename C>
struct Loader {
  const AttentionCall& call;
  const QueryTile& query;
  std::int64_t h_kv;
  int dim_qk, first_dim, dims_v;  // of v: the block's piece
  bool q_aligned, k_aligned, v_aligned;

  __device__ Loader(const AttentionCall& call_, const QueryTile& query_, int first_dim_)
      : call(call_),
        query(query_),
        h_kv(query.h / call.group()),
        dim_qk(static_cast<int>(call.problem.dim_qk)),
        first_dim(first_dim_),
        dims_v(min(C::dim, static_cast<int>(call.problem.dim_v) - first_dim)),
        q_aligned(aligned_rows(call.q, call.problem.dim_qk)),
        k_aligned(aligned_rows(call.k, call.problem.dim_qk)),
        v_aligned(aligned_rows(call.v, call.problem.dim_v)) {}

  __device__ int dims(int piece) const { return min(C::dim, dim_qk - piece * C::dim); }
  __device__ int depth(int piece) const { return (dims(piece) + 7) / 8 * 8; }

  __device__ void queries(int piece, float* to) const {
    const RowAddress from{call, call.q, query.b, query.h, query.sequence.first_q + query.first, false};
    load_rows<C::queries, C::dim, C::threads>(to, from, query.count, piece * C::dim, dims(piece), q_aligned);
  }
  __device__ void keys(const KeyTile& tile, int piece, float* to) const {
    load_rows<C::keys, C::dim, C::threads>(to, address(call.k, tile), tile.count, piece * C::dim, dims(piece),
                                           k_aligned);
  }
  __device__ void values(const KeyTile& tile, float* to) const {
    load_rows<C::keys, C::dim, C::threads>(to, address(call.v, tile), tile.count, first_dim, dims_v,
                                           v_aligned);
  }

 private:
  __device__ RowAddress address(const Rows& rows, const KeyTile& tile) const {
    const bool paged = call.problem.layout == Layout::paged;
    return {call, rows, query.b, h_kv, paged ? tile.first : query.sequence.first_k + tile.first, paged};
  }
};

template <typename C, bool features>
__global__ void __launch_bounds__(C::threads, C::blocks)
    fused_forward(const __grid_constant__ AttentionCall call, const Blocks blocks) {
  extern __shared__ __align__(16) float shared[];
  float* q_smem = shared;                  // [D piece, queries], turned
  float* k_smem = q_smem + C::q_floats;    // [D piece, keys], turned
  float* k_loaded = k_smem + C::k_floats;  // [keys, D piece]: the next ones, before they are turned
  float* v_smem = k_loaded + C::k_floats;  // [keys, Dv piece]
  float* p_smem = v_smem + C::k_floats;    // [keys, queries]
  float* q_loaded = v_smem;                // [queries, D piece], before anything else needs the place

  // Heads one after another, the last queries of each first: with causal they see the most keys.
  const std::int64_t index = blockIdx.x / blocks.dim_pieces;
  const int first_dim = static_cast<int>(blockIdx.x % blocks.dim_pieces) * C::dim;
  const std::int64_t head = index / blocks.queries.tiles;
  const std::int64_t b = head / call.problem.heads_q;
  const std::int64_t h = head % call.problem.heads_q;
  const QueryTile query =
      blocks.queries.tile(call, b, h, blocks.queries.tiles - 1 - index % blocks.queries.tiles);
  if (query.count <= 0) return;

  const typename C::Grid grid;
  const ScoreRules rules(call, b, h);
  const Loader<C> load(call, query, first_dim);
  const int pieces = (load.dim_qk + C::dim - 1) / C::dim;
  const KeyRange all = query.all(call);

  float o[C::M][C::V] = {};
  SoftmaxRow<C> row;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    row.maximum[m] = -3.402823466e38f;
    row.sum[m] = 0;
  }

  KeyTiles tiles(call, query, C::keys);
  KeyTile keys = tiles.next();
  if (keys.count > 0 && pieces == 1) {
    load.queries(0, q_loaded);
    load.keys(keys, 0, k_loaded);
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // queries are there
    turn_tile<C::queries, C::dim, C::threads>(q_smem, q_loaded, load.depth(0), 1.0f);
    __syncthreads();  // their place is free for values and weights
  }
  while (keys.count > 0) {
    const KeyTile ahead = tiles.next();
    float s[C::M][C::N] = {};
    if (pieces == 1) {
      load.values(keys, v_smem);
      commit_copies();
      wait_copies<1>();  // keys; values may still be under way
      __syncthreads();   // keys are there, loaded by everyone
      turn_tile<C::keys, C::dim, C::threads>(k_smem, k_loaded, load.depth(0), 1.0f);
      __syncthreads();  // and turned; the place they were loaded to is free
      if (ahead.count > 0) load.keys(ahead, 0, k_loaded);
      commit_copies();
      multiply_turned<typename C::QTile, typename C::KTile>(s, q_smem, k_smem, load.depth(0), grid);
    } else {
      for (int piece = 0; piece < pieces; ++piece) {
        load.queries(piece, q_loaded);
        load.keys(keys, piece, k_loaded);
        commit_copies();
        wait_copies<0>();
        __syncthreads();  // the piece is there, and everyone is done with the one before
        turn_tile<C::queries, C::dim, C::threads>(q_smem, q_loaded, load.depth(piece), 1.0f);
        turn_tile<C::keys, C::dim, C::threads>(k_smem, k_loaded, load.depth(piece), 1.0f);
        __syncthreads();  // and turned
        multiply_turned<typename C::QTile, typename C::KTile>(s, q_smem, k_smem, load.depth(piece), grid);
      }
      load.values(keys, v_smem);
      commit_copies();
      commit_copies();  // an empty group, so that the count below holds here too
    }
    const bool edge =
        keys.first < all.first || keys.first + C::keys > all.last || keys.count < C::keys || keys.tile >= 0;
    if constexpr (features) {
      finish_scores<C>(call, rules, query, keys, edge, grid, s);
    } else {
      finish_plain_scores<C>(call, rules, query, keys, edge, grid, s);
    }
    softmax<C, features>(s, o, row);
    if constexpr (features) {
      if (call.problem.features.dropout) drop<C>(call, query, keys, grid, s);
    }
    store_weights<C>(s, p_smem, grid);
    wait_copies<1>();  // values; the next keys may still be under way
    __syncthreads();   // weights and values are there
    multiply_turned<typename C::PTile, typename C::VTile>(o, p_smem, v_smem, (keys.count + 7) / 8 * 8, grid);
    __syncthreads();  // everyone is done with weights and values
    keys = ahead;
  }
  finish<C, features>(call, query, first_dim, grid, o, row);
}

template <typename C, bool features>
void run(const AttentionCall& call, cudaStream_t stream) {
  const Blocks blocks{QueryGrid::of(call, C::queries),
                      static_cast<int>((call.problem.dim_v + C::dim - 1) / C::dim)};
  launch<fused_forward<C, features>>(
      {.name = "tilewise fused forward",
       .blocks = call.problem.batch * call.problem.heads_q * blocks.queries.tiles * blocks.dim_pieces,
       .threads = C::threads,
       .shared_bytes = C::shared_bytes,
       .stream = stream},
      call, blocks);
}

}  // namespace

void fused_forward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  clear_unused_outputs(call, stream);
  const bool narrow = problem.dim_qk <= 64 && problem.dim_v <= 64;
  if (problem.features.needs_more_than_band()) {
    return narrow ? run<Small64, true>(call, stream) : run<Small128, true>(call, stream);
  }
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t wide_tiles =
      heads * QueryGrid::of(call, narrow ? Wide64::queries : Wide128::queries).tiles;
  // A small tile does a third of the work a second, so it pays only where most of the GPU would stand idle.
  const bool few = 4 * wide_tiles < 3 * device_properties(context.device.index).multiprocessors;
  if (narrow) return few ? run<Small64, false>(call, stream) : run<Wide64, false>(call, stream);
  return few ? run<Small128, false>(call, stream) : run<Wide128, false>(call, stream);
}

}  // namespace tilewise::cuda::simt
