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

// What a configuration says: the threads, and what each holds.
template <int rows_, int columns_, int queries_each, int keys_each, int dims_each>
struct Config {
  using Grid = ThreadGrid<rows_, columns_>;
  static constexpr int M = queries_each;
  static constexpr int N = keys_each;
  static constexpr int V = dims_each;
  static constexpr int threads = Grid::threads;
  static constexpr int queries = rows_ * M;
  static constexpr int keys = columns_ * N;
  static constexpr int dim = columns_ * V;  // of a piece of D, and of a piece of Dv
  using QTile = SharedTile<dim, 0>;
  using KTile = SharedTile<dim, 2>;   // a thread reads four consecutive keys
  using VTile = SharedTile<dim, 31>;  // read by columns: not swizzled
  using PTile = SharedTile<keys, 0>;
  static constexpr int q_floats = QTile::floats(queries);
  static constexpr int k_floats = KTile::floats(keys);
  static constexpr int v_floats = VTile::floats(keys);
  static constexpr int p_floats = PTile::floats(queries);
  static constexpr std::size_t shared_bytes = sizeof(float) * (q_floats + k_floats + v_floats + p_floats);
};

// Dims to 64 and beyond; the small ones when there are too few queries to fill the GPU with the large.
using Wide64 = Config<16, 8, 8, 8, 8>;
using Wide128 = Config<8, 16, 8, 4, 8>;
using Small64 = Config<8, 16, 4, 4, 4>;
using Small128 = Config<8, 16, 4, 4, 8>;

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
    const KeyRange range = call.keys_of(query.sequence, query.first + grid.row + C::Grid::rows * m);
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
    const std::int64_t i = query.first + min(grid.row + C::Grid::rows * m, query.count - 1);
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      const std::int64_t j = keys.first + grid.column * 4 + n / 4 * 4 * C::Grid::columns + n % 4;
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
    const std::int64_t i = query.first + grid.row + C::Grid::rows * m;
#pragma unroll
    for (int n = 0; n < C::N; n += 4) {
      const std::int64_t j = keys.first + grid.column * 4 + n * C::Grid::columns;
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
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; n += 4) {
      const int chunk = grid.column + n / 4 * C::Grid::columns;
      *reinterpret_cast<float4*>(p_smem + C::PTile::at(grid.row + C::Grid::rows * m, chunk)) =
          float4{p[m][n], p[m][n + 1], p[m][n + 2], p[m][n + 3]};
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
    const int r = grid.row + C::Grid::rows * m;
    float sum = row_sum<C>(row.sum[m]);
    float maximum = row.maximum[m];
    float factor = 1;
    if (r >= query.count) continue;
    if (call.problem.features.sinks) {
      const float sink = static_cast<float>(call.sinks.at(query.b, query.h)) * (features ? 1.0f : log2e);
      const float highest = fmaxf(maximum, sink);
      factor = exp_of<features>(maximum - highest);
      sum = sum * factor + exp_of<features>(sink - highest);
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
      store_chunk(out, call.o.dtype, grid.column * 4 + d * C::Grid::columns, dims, aligned,
                  {o[m][d] * inverse, o[m][d + 1] * inverse, o[m][d + 2] * inverse, o[m][d + 3] * inverse});
    }
  }
}

struct Blocks {
  QueryGrid queries;
  int dim_pieces;  // of Dv
};

template <typename C, bool features>
__global__ void __launch_bounds__(C::threads, 2)
    fused_forward(const __grid_constant__ AttentionCall call, const Blocks blocks) {
  extern __shared__ __align__(16) float shared[];
  float* q_smem = shared;                // [queries, D piece]
  float* k_smem = q_smem + C::q_floats;  // [keys, D piece]
  float* v_smem = k_smem + C::k_floats;  // [keys, Dv piece]
  float* p_smem = v_smem + C::v_floats;  // [queries, keys]

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
  const std::int64_t h_kv = h / call.group();
  const int dim_qk = static_cast<int>(call.problem.dim_qk);
  const int dims_v = min(C::dim, static_cast<int>(call.problem.dim_v) - first_dim);
  const int pieces = (dim_qk + C::dim - 1) / C::dim;
  const bool q_aligned = aligned_rows(call.q, call.problem.dim_qk);
  const bool k_aligned = aligned_rows(call.k, call.problem.dim_qk);
  const bool v_aligned = aligned_rows(call.v, call.problem.dim_v);
  const KeyRange all = query.all(call);

  const auto load_q = [&](int piece) {
    load_tile<typename C::QTile, C::threads>(
        q_smem, C::queries, query.count, piece * C::dim, min(C::dim, dim_qk - piece * C::dim), call.q.dtype,
        q_aligned, [&](int r) { return call.q.at(b, h, query.sequence.first_q + query.first + r); });
  };
  const auto load_k = [&](const KeyTile& keys, int piece) {
    load_tile<typename C::KTile, C::threads>(
        k_smem, C::keys, keys.count, piece * C::dim, min(C::dim, dim_qk - piece * C::dim), call.k.dtype,
        k_aligned, [&](int r) { return call.key_row(call.k, query.sequence, b, h_kv, keys.first + r); });
  };
  const auto load_v = [&](const KeyTile& keys) {
    load_tile<typename C::VTile, C::threads>(
        v_smem, C::keys, keys.count, first_dim, dims_v, call.v.dtype, v_aligned,
        [&](int r) { return call.key_row(call.v, query.sequence, b, h_kv, keys.first + r); });
  };

  float o[C::M][C::V] = {};
  SoftmaxRow<C> row;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    row.maximum[m] = -3.402823466e38f;
    row.sum[m] = 0;
  }

  KeyTiles tiles(call, query, C::keys);
  KeyTile keys = tiles.next();
  if (keys.count > 0) {
    load_q(0);
    load_k(keys, 0);
  }
  commit_copies();
  while (keys.count > 0) {
    const KeyTile ahead = tiles.next();
    load_v(keys);
    commit_copies();
    float s[C::M][C::N] = {};
    for (int piece = 0; piece < pieces; ++piece) {
      if (piece > 0) {
        __syncthreads();  // everyone is done with the piece before
        load_q(piece);
        load_k(keys, piece);
        commit_copies();
        wait_copies<0>();
      } else {
        wait_copies<1>();  // q and k; v may still be under way
      }
      __syncthreads();  // q and k are there
      multiply_rows<C::M, C::N, typename C::Grid, typename C::QTile, typename C::KTile>(
          s, q_smem, k_smem, (min(C::dim, dim_qk - piece * C::dim) + 3) / 4, grid);
    }
    __syncthreads();  // everyone is done with k (and with q, if it comes in pieces)
    if (ahead.count > 0) {
      if (pieces > 1) load_q(0);
      load_k(ahead, 0);
    }
    commit_copies();
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
    wait_copies<1>();  // v; the next k may still be under way
    __syncthreads();   // weights and v are there
    multiply_columns<C::M, C::V, typename C::Grid, typename C::PTile, typename C::VTile>(
        o, p_smem, v_smem, (keys.count + 3) / 4, grid);
    __syncthreads();  // everyone is done with weights and v
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
  const bool few = wide_tiles < 2 * device_properties(context.device.index).multiprocessors;
  if (narrow) return few ? run<Small64, false>(call, stream) : run<Wide64, false>(call, stream);
  return few ? run<Small128, false>(call, stream) : run<Wide128, false>(call, stream);
}

}  // namespace tilewise::cuda::simt
