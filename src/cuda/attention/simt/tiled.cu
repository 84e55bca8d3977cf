#include "cuda/attention/common/key_tiles.cuh"
#include "cuda/attention/simt/dense.h"
#include "cuda/attention/simt/dense_rows.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda::simt {
namespace {

// The passes of naive, with each product cut into tiles. A CTA loads tiles of both operands into shared
// memory, with neighbouring threads reading neighbouring elements, and uses each element 64 times. One warp
// computes a row of the softmax. S still passes through memory between the products.

// A CTA computes a square tile of a result. A thread has 4 x 4 of its elements, at a distance of 16 both
// ways.
constexpr int grid_side = 16;
constexpr int each = 4;
constexpr int tile = grid_side * each;
constexpr int threads = grid_side * grid_side;
constexpr int depth = 32;  // how much of K, the dimension that is summed over, is in shared memory at once
constexpr int warp = 32;

// An operand's tile, [K, row]. The odd pitch puts a column's elements into different banks, so that a tile
// can be filled along either dimension.
using SharedTile = float[depth][tile + 1];
using Sums = float[each][each];

struct SharedOperands {
  SharedTile a, b;
};

// Row and column of this thread's elements in the CTA's tile.
__device__ __forceinline__ int tile_row(int m) {
  return static_cast<int>(threadIdx.x) / grid_side + grid_side * m;
}
__device__ __forceinline__ int tile_column(int n) {
  return static_cast<int>(threadIdx.x) % grid_side + grid_side * n;
}

enum class Contiguous { depth, rows };

// An operand: `rows` rows (or columns) of the result's tile by K. One of the two dimensions is contiguous,
// the other has the stride.
template <typename T, Contiguous contiguous>
struct Operand {
  const T* data_gmem;  // the tile's first row at k = 0
  std::int64_t stride;
  int rows;
};

// Fills a tile with k from `first` up to `last`, and with zeros where the operand ends.
template <typename T, Contiguous contiguous>
__device__ __forceinline__ void load(SharedTile& to_smem, const Operand<T, contiguous>& from,
                                     std::int64_t first, std::int64_t last) {
#pragma unroll
  for (int n = 0; n < tile * depth / threads; ++n) {
    const int index = static_cast<int>(threadIdx.x) + threads * n;
    const int k = contiguous == Contiguous::depth ? index % depth : index / tile;
    const int row = contiguous == Contiguous::depth ? index / depth : index % tile;
    const std::int64_t at =
        contiguous == Contiguous::depth ? row * from.stride + first + k : (first + k) * from.stride + row;
    const bool present = row < from.rows && first + k < last;
    to_smem[k][row] = present ? widen(from.data_gmem[at]) : 0.0f;
  }
}

__device__ __forceinline__ void add(Sums& sum, const Sums& part) {
#pragma unroll
  for (int m = 0; m < each; ++m) {
#pragma unroll
    for (int n = 0; n < each; ++n) sum[m][n] += part[m][n];
  }
}

// sum[row, column] += Σ_k a[row, k]·b[column, k] for k from `first` up to `last`, the same in all threads.
// Each step's product has an accumulator of its own: the error of a running sum grows with its length.
template <typename A, typename B>
__device__ __forceinline__ void add_product(Sums& sum, SharedOperands& shared, const A& a, const B& b,
                                            std::int64_t first, std::int64_t last) {
  for (std::int64_t k0 = first; k0 < last; k0 += depth) {
    load(shared.a, a, k0, last);
    load(shared.b, b, k0, last);
    __syncthreads();  // both tiles are stored
    Sums part = {};
#pragma unroll
    for (int k = 0; k < depth; ++k) {
      float a_rmem[each], b_rmem[each];
#pragma unroll
      for (int m = 0; m < each; ++m) a_rmem[m] = shared.a[k][tile_row(m)];
#pragma unroll
      for (int n = 0; n < each; ++n) b_rmem[n] = shared.b[k][tile_column(n)];
#pragma unroll
      for (int m = 0; m < each; ++m) {
#pragma unroll
        for (int n = 0; n < each; ++n) part[m][n] = fmaf(a_rmem[m], b_rmem[n], part[m][n]);
      }
    }
    add(sum, part);
    __syncthreads();  // all threads have read both tiles, which the next step overwrites
  }
}

__host__ __device__ constexpr std::int64_t tiles_of(std::int64_t length) {
  return (length + tile - 1) / tile;
}

__device__ __forceinline__ int tile_count(std::int64_t first, std::int64_t length) {
  return static_cast<int>(max(min(length - first, static_cast<std::int64_t>(tile)), std::int64_t{0}));
}

// Tiles of queries are numbered over [B, Hq, tiles of Sq].
__device__ __forceinline__ QueryTile query_tile(const AttentionCall& call, std::int64_t index) {
  const std::int64_t tiles = tiles_of(call.problem.length_q);
  const std::int64_t first = index % tiles * tile;
  const std::int64_t b = index / tiles / call.problem.heads_q;
  return {.b = b,
          .h = index / tiles % call.problem.heads_q,
          .first = first,
          .count = tile_count(first, call.problem.length_q),
          .sequence = call.sequence(b)};
}

// A tile of queries by a tile of keys, numbered over [B, Hq, tiles of Sq, tiles of Sk].
struct PairTile {
  QueryTile query;
  std::int64_t first_key;

  __device__ PairTile(const AttentionCall& call, std::int64_t index)
      : query(query_tile(call, index / tiles_of(call.problem.length_k))),
        first_key(index % tiles_of(call.problem.length_k) * tile) {}

  // Whether any query of the tile sees any of its keys, by band and lengths.
  __device__ bool seen(const AttentionCall& call) const {
    const KeyRange any = query.any(call);
    return max(any.first, first_key) < min(any.last, first_key + tile);
  }

  // sum += queries · keysᵀ, for two tensors with rows of queries and of keys.
  template <typename T>
  __device__ void add_products(Sums& sum, SharedOperands& shared, const AttentionCall& call,
                               const Rows& queries, const Rows& keys, std::int64_t dim) const {
    using Operands = Operand<T, Contiguous::depth>;
    const std::int64_t h_kv = call.key_head(query.h);
    add_product(sum, shared,
                Operands{reinterpret_cast<const T*>(queries.at(query.b, query.h, query.first)),
                         queries.stride_s, query.count},
                Operands{reinterpret_cast<const T*>(keys.at(query.b, h_kv, first_key)), keys.stride_s,
                         tile_count(first_key, query.sequence.length_k)},
                0, dim);
  }

  // Calls body(row, m) for this thread's queries.
  template <typename Body>
  __device__ void for_each_row(const AttentionCall& call, const Body& body) const {
#pragma unroll
    for (int m = 0; m < each; ++m) {
      if (tile_row(m) < query.count) body(QueryRow(call, query.b, query.h, query.first + tile_row(m)), m);
    }
  }

  // Calls body(j, n) for this thread's keys.
  template <typename Body>
  __device__ void for_each_key(const AttentionCall& call, const Body& body) const {
#pragma unroll
    for (int n = 0; n < each; ++n) {
      const std::int64_t j = first_key + tile_column(n);
      if (j < call.problem.length_k) body(j, n);
    }
  }
};

// A tile of S: s = score(q_i·k_j), −inf where hidden.
template <typename T>
__global__ void __launch_bounds__(threads, 2) tiled_scores(const __grid_constant__ AttentionCall call,
                                                           float* s_gmem) {  // [B, Hq, Sq, Sk]
  __shared__ SharedOperands shared;
  const PairTile pairs(call, blockIdx.x);
  const ScoreRule rules(call, pairs.query.b, pairs.query.h);
  Sums qk = {};
  if (pairs.seen(call)) pairs.template add_products<T>(qk, shared, call, call.q, call.k, call.problem.dim_qk);
  pairs.for_each_row(call, [&](const QueryRow& row, int m) {
    float* row_gmem = s_gmem + row.index(call) * call.problem.length_k;  // [Sk]
    pairs.for_each_key(
        call, [&](std::int64_t j, int n) { row_gmem[j] = pair_score(call, rules, row, j, qk[m][n]); });
  });
}

// A tile of q·k and of dO·v, stored in the place of P and dS.
template <typename T>
__global__ void __launch_bounds__(threads, 2)
    tiled_products(const __grid_constant__ AttentionCall call, const BackwardScratch scratch) {
  __shared__ SharedOperands shared;
  const PairTile pairs(call, blockIdx.x);
  Sums qk = {};
  Sums dp = {};
  if (pairs.seen(call)) {
    pairs.template add_products<T>(qk, shared, call, call.q, call.k, call.problem.dim_qk);
    pairs.template add_products<T>(dp, shared, call, call.d_o, call.v, call.problem.dim_v);
  }
  pairs.for_each_row(call, [&](const QueryRow& row, int m) {
    const std::int64_t row_at = row.index(call) * call.problem.length_k;
    pairs.for_each_key(call, [&](std::int64_t j, int n) {
      scratch.p[row_at + j] = qk[m][n];
      scratch.ds[row_at + j] = dp[m][n];
    });
  });
}

// Writes this thread's part of a tile of rows; row_of(m) is where row m of the tile begins.
template <typename T, typename RowOf>
__device__ __forceinline__ void store(const Sums& sum, float factor, int rows, int first_dim, int dims,
                                      const RowOf& row_of) {
#pragma unroll
  for (int m = 0; m < each; ++m) {
    if (tile_row(m) >= rows) continue;
    T* row_gmem = reinterpret_cast<T*>(row_of(tile_row(m))) + first_dim;  // [dims]
#pragma unroll
    for (int n = 0; n < each; ++n) {
      if (tile_column(n) < dims) row_gmem[tile_column(n)] = narrow<T>(factor * sum[m][n]);
    }
  }
}

// O or dQ: out[i, d] = factor · Σ_j matrix[i, j]·keys[j, d]. The grid is [B, Hq, tiles of Sq, tiles of dim].
template <typename T>
__global__ void __launch_bounds__(threads) tiled_query_sums(const __grid_constant__ AttentionCall call,
                                                            const float* matrix_gmem,  // [B, Hq, Sq, Sk]
                                                            const Rows keys,           // [B, Hkv, Sk, dim]
                                                            const Rows out,            // [B, Hq, Sq, dim]
                                                            const std::int64_t dim, const float factor) {
  __shared__ SharedOperands shared;
  const QueryTile query = query_tile(call, blockIdx.x / tiles_of(dim));
  const int first_dim = static_cast<int>(blockIdx.x % tiles_of(dim)) * tile;
  const int dims = tile_count(first_dim, dim);
  const AttentionProblem& problem = call.problem;
  const std::int64_t first_row = (query.b * problem.heads_q + query.h) * problem.length_q + query.first;
  const std::int64_t h_kv = call.key_head(query.h);
  const KeyRange any = query.any(call);
  Sums sum = {};
  add_product(sum, shared,
              Operand<float, Contiguous::depth>{matrix_gmem + first_row * problem.length_k, problem.length_k,
                                                query.count},
              Operand<T, Contiguous::rows>{reinterpret_cast<const T*>(keys.at(query.b, h_kv, 0)) + first_dim,
                                           keys.stride_s, dims},
              any.first, any.last);
  store<T>(sum, factor, query.count, first_dim, dims,
           [&](int r) { return out.at(query.b, query.h, query.first + r); });
}

// dK or dV: out[j, d] = factor · Σ_i matrix[i, j]·queries[i, d], also summed over the query heads that share
// the keys. The grid is [B, Hkv, tiles of Sk, tiles of dim].
template <typename T>
__global__ void __launch_bounds__(threads) tiled_key_sums(const __grid_constant__ AttentionCall call,
                                                          const float* matrix_gmem,  // [B, Hq, Sq, Sk]
                                                          const Rows queries,        // [B, Hq, Sq, dim]
                                                          const Rows out,            // [B, Hkv, Sk, dim]
                                                          const std::int64_t dim, const float factor) {
  __shared__ SharedOperands shared;
  const AttentionProblem& problem = call.problem;
  const std::int64_t index = blockIdx.x / tiles_of(dim);
  const int first_dim = static_cast<int>(blockIdx.x % tiles_of(dim)) * tile;
  const int dims = tile_count(first_dim, dim);
  const std::int64_t first_key = index % tiles_of(problem.length_k) * tile;
  const std::int64_t h_kv = index / tiles_of(problem.length_k) % problem.heads_kv;
  const std::int64_t b = index / tiles_of(problem.length_k) / problem.heads_kv;
  const int count = tile_count(first_key, problem.length_k);

  // The queries that see any of these keys.
  const std::int64_t offset = call.sequence(b).band_offset;
  const std::int64_t first = max(first_key - call.band.right - offset, std::int64_t{0});
  const std::int64_t last = min(first_key + tile + call.band.left - offset, problem.length_q);
  Sums sum = {};
  for (std::int64_t h = h_kv * call.group(); h < (h_kv + 1) * call.group(); ++h) {
    const std::int64_t first_row = (b * problem.heads_q + h) * problem.length_q;
    Sums part = {};
    add_product(part, shared,
                Operand<float, Contiguous::rows>{matrix_gmem + first_row * problem.length_k + first_key,
                                                 problem.length_k, count},
                Operand<T, Contiguous::rows>{reinterpret_cast<const T*>(queries.at(b, h, 0)) + first_dim,
                                             queries.stride_s, dims},
                first, last);
    add(sum, part);
  }
  store<T>(sum, factor, count, first_dim, dims, [&](int r) { return out.at(b, h_kv, first_key + r); });
}

Launch block_each(const char* name, std::int64_t count, const Context& context) {
  return {
      .name = name, .blocks = count, .threads = threads, .stream = static_cast<cudaStream_t>(context.stream)};
}
Launch warp_each(const char* name, std::int64_t count, const Context& context) {
  return block_each(name, (count * warp + threads - 1) / threads, context);
}

template <typename T>
void forward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t query_tiles = problem.batch * problem.heads_q * tiles_of(problem.length_q);
  Arena arena(context.workspace.data);
  const ForwardScratch scratch(arena, call);
  launch<tiled_scores<T>>(block_each("tilewise tiled S", query_tiles * tiles_of(problem.length_k), context),
                          call, scratch.s);
  launch<softmax_rows<warp>>(warp_each("tilewise tiled softmax", problem.heads_q * call.rows_q(), context),
                             call, scratch.s);
  launch<tiled_query_sums<T>>(
      block_each("tilewise tiled output", query_tiles * tiles_of(problem.dim_v), context), call, scratch.s,
      call.v, call.o, problem.dim_v, 1.0f);
}

template <typename T>
void backward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t query_tiles = problem.batch * problem.heads_q * tiles_of(problem.length_q);
  const std::int64_t key_tiles = problem.batch * problem.heads_kv * tiles_of(problem.length_k);
  const auto scale = static_cast<float>(call.scale);
  Arena arena(context.workspace.data);
  const BackwardScratch scratch(arena, call);
  launch<tiled_products<T>>(
      block_each("tilewise tiled products", query_tiles * tiles_of(problem.length_k), context), call,
      scratch);
  launch<differentiate_rows<warp>>(warp_each("tilewise tiled dS", problem.heads_q * call.rows_q(), context),
                                   call, all_rows(call, scratch));
  if (call.dq.wanted) {
    launch<tiled_query_sums<T>>(
        block_each("tilewise tiled dq", query_tiles * tiles_of(problem.dim_qk), context), call, scratch.dqk,
        call.k, call.dq, problem.dim_qk, scale);
  }
  if (call.dk.wanted) {
    launch<tiled_key_sums<T>>(block_each("tilewise tiled dk", key_tiles * tiles_of(problem.dim_qk), context),
                              call, scratch.dqk, call.q, call.dk, problem.dim_qk, scale);
  }
  if (call.dv.wanted) {
    launch<tiled_key_sums<T>>(block_each("tilewise tiled dv", key_tiles * tiles_of(problem.dim_v), context),
                              call, scratch.p, call.d_o, call.dv, problem.dim_v, 1.0f);
  }
  if (problem.features.mask_gradient) {
    const std::int64_t(&extent)[4] = call.dmask.extent;
    const std::int64_t elements = extent[0] * extent[1] * extent[2] * extent[3];
    launch<sum_mask>(block_each("tilewise tiled dmask", (elements + threads - 1) / threads, context), call,
                     scratch);
  }
  if (call.dsinks != nullptr) {
    launch<sum_sinks<warp>>(warp_each("tilewise tiled dsinks", problem.heads_q, context), call,
                            scratch.sink_terms);
  }
}

}  // namespace

void tiled_forward(const AttentionCall& call, const Context& context) {
  with_type(call.problem.dtype, [&]<typename T>() { forward<T>(call, context); });
}

void tiled_backward(const AttentionCall& call, const Context& context) {
  with_type(call.problem.dtype, [&]<typename T>() { backward<T>(call, context); });
}

}  // namespace tilewise::cuda::simt
