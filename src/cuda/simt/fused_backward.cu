#include "core/arena.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/simt/backward_stage.cuh"
#include "cuda/simt/fused.h"
#include "cuda/simt/row_gradients.h"

namespace tilewise::cuda::simt {
namespace {

// Backward by recomputation, without atomics, so it is repeatable: one kernel walks over keys for each tile
// of queries and gives dq, another walks over queries for each tile of keys and gives dk and dv. Both are one
// template, the two sides exchanged. It costs seven products where five would do; atomics would cost the
// repeatability.

struct Blocks {
  QueryGrid queries;
  KeyGrid keys;
  int dim_pieces;
};

template <typename C>
__device__ __forceinline__ void store_rows(const Rows& rows, int valid, int first_dim, std::int64_t dim,
                                           float factor, const typename C::Grid& grid,
                                           const float (&sum)[C::M][C::V], std::int64_t b, std::int64_t h,
                                           std::int64_t first_row) {
  const bool aligned = aligned_rows(rows, dim);
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const int r = grid.own(m);
    if (r >= valid) continue;
    std::byte* to = rows.at(b, h, first_row + r) + first_dim * size_of(rows.dtype);
#pragma unroll
    for (int d = 0; d < C::V; d += 4) {
      store_chunk(
          to, rows.dtype, grid.column * 4 + d * C::Grid::columns, static_cast<int>(dim) - first_dim, aligned,
          {factor * sum[m][d], factor * sum[m][d + 1], factor * sum[m][d + 2], factor * sum[m][d + 3]});
    }
  }
}

// dq: a block keeps queries and one piece of D, and walks over keys.
template <typename C, bool features>
__global__ void __launch_bounds__(C::threads)
    fused_backward_queries(const __grid_constant__ AttentionCall call, const Blocks blocks,
                           const float* shifts) {
  extern __shared__ __align__(16) float shared[];
  const int piece = static_cast<int>(blockIdx.x % blocks.dim_pieces);
  const std::int64_t index = blockIdx.x / blocks.dim_pieces;
  const std::int64_t head = index / blocks.queries.tiles;
  const std::int64_t b = head / call.problem.heads_q;
  const std::int64_t h = head % call.problem.heads_q;
  const QueryTile query =
      blocks.queries.tile(call, b, h, blocks.queries.tiles - 1 - index % blocks.queries.tiles);
  if (query.count <= 0) return;
  const typename C::Grid grid;
  const Stage<C, Side::queries> stage(call, shared);
  const ScoreRules rules(call, b, h);
  float dq[C::M][C::V] = {};
  KeyTiles tiles(call, query, C::other);
  bool own_is_there = false;
  for (KeyTile keys = tiles.next(); keys.count > 0; keys = tiles.next()) {
    float weights[C::M][C::N], dscores[C::M][C::N];
    differentiate_pairs<C, Side::queries, features>(stage, rules, query, keys, shifts, own_is_there, true,
                                                    grid, weights, dscores);
    own_is_there = true;
    store_pairs<C>(dscores, stage.dscores, grid);
    if (stage.pieces_qk > 1) __syncthreads();  // everyone is done with k's last piece
    stage.reload_other(query, keys, piece, false);
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // score gradients are there, and k's piece
    multiply_columns<C::M, C::V, typename C::Grid, typename C::PairTile, typename C::OtherTile>(
        dq, stage.dscores, stage.other, (keys.count + 3) / 4, grid);
  }
  store_rows<C>(call.dq, query.count, piece * C::dim, call.problem.dim_qk, static_cast<float>(call.scale),
                grid, dq, b, h, query.sequence.first_q + query.first);
}

// dk and dv: a block keeps keys and one piece of D and of Dv, and walks over the queries of every head in the
// group.
template <typename C, bool features>
__global__ void __launch_bounds__(C::threads) fused_backward_keys(const __grid_constant__ AttentionCall call,
                                                                  const Blocks blocks, const float* shifts) {
  extern __shared__ __align__(16) float shared[];
  const int piece = static_cast<int>(blockIdx.x % blocks.dim_pieces);
  const std::int64_t index = blockIdx.x / blocks.dim_pieces;
  const std::int64_t head = index / blocks.keys.tiles;
  const std::int64_t b = head / call.problem.heads_kv;
  const std::int64_t h_kv = head % call.problem.heads_kv;
  const Sequence sequence = call.sequence(b);
  KeyTile keys = blocks.keys.tile(call, sequence, index % blocks.keys.tiles);
  if (keys.count <= 0) return;
  const typename C::Grid grid;
  const Stage<C, Side::keys> stage(call, shared);
  float dk[C::M][C::V] = {};
  float dv[C::M][C::V] = {};
  bool own_is_there = false;
  for (std::int64_t h = h_kv * call.group(); h < (h_kv + 1) * call.group(); ++h) {
    const ScoreRules rules(call, b, h);
    for (std::int64_t tile = 0; tile < blocks.queries.tiles; ++tile) {
      const QueryTile query = blocks.queries.tile(call, b, h, tile);
      if (!meets(call, query, keys)) continue;
      float weights[C::M][C::N], dscores[C::M][C::N];
      differentiate_pairs<C, Side::keys, features>(stage, rules, query, keys, shifts, own_is_there, true,
                                                   grid, weights, dscores);
      own_is_there = true;
      store_pairs<C>(weights, stage.weights, grid);
      store_pairs<C>(dscores, stage.dscores, grid);
      if (stage.pieces_qk > 1 || stage.pieces_v > 1)
        __syncthreads();  // everyone is done with the last pieces
      stage.reload_other(query, keys, piece, false);
      stage.reload_other(query, keys, piece, true);
      commit_copies();
      wait_copies<0>();
      __syncthreads();  // weights and score gradients are there, and the pieces
      const int chunks = (query.count + 3) / 4;
      if (piece < stage.pieces_v) {
        multiply_columns<C::M, C::V, typename C::Grid, typename C::PairTile, typename C::OtherTile>(
            dv, stage.weights, stage.other_v, chunks, grid);
      }
      if (piece < stage.pieces_qk) {
        multiply_columns<C::M, C::V, typename C::Grid, typename C::PairTile, typename C::OtherTile>(
            dk, stage.dscores, stage.other, chunks, grid);
      }
    }
  }
  if (call.dk.wanted && piece < stage.pieces_qk) {
    store_rows<C>(call.dk, keys.count, piece * C::dim, call.problem.dim_qk, static_cast<float>(call.scale),
                  grid, dk, b, h_kv, sequence.first_k + keys.first);
  }
  if (call.dv.wanted && piece < stage.pieces_v) {
    store_rows<C>(call.dv, keys.count, piece * C::dim, call.problem.dim_v, 1.0f, grid, dv, b, h_kv,
                  sequence.first_k + keys.first);
  }
}

template <typename C, bool features>
void run(const AttentionCall& call, const float* shifts, cudaStream_t stream) {
  const AttentionProblem& problem = call.problem;
  const auto pieces = [](std::int64_t dim) { return static_cast<int>((dim + C::dim - 1) / C::dim); };
  if (call.dq.wanted) {
    const Blocks blocks{QueryGrid::of(call, C::own), {}, pieces(problem.dim_qk)};
    launch<fused_backward_queries<C, features>>(
        {.name = "tilewise fused backward, queries",
         .blocks = problem.batch * problem.heads_q * blocks.queries.tiles * blocks.dim_pieces,
         .threads = C::threads,
         .shared_bytes = shared_bytes<C, Side::queries>(),
         .stream = stream},
        call, blocks, shifts);
  }
  if (call.dk.wanted || call.dv.wanted) {
    const Blocks blocks{QueryGrid::of(call, C::other), KeyGrid::of(call, C::own),
                        pieces(std::max(problem.dim_qk, problem.dim_v))};
    launch<fused_backward_keys<C, features>>(
        {.name = "tilewise fused backward, keys",
         .blocks = problem.batch * problem.heads_kv * blocks.keys.tiles * blocks.dim_pieces,
         .threads = C::threads,
         .shared_bytes = shared_bytes<C, Side::keys>(),
         .stream = stream},
        call, blocks, shifts);
  }
}

}  // namespace

std::size_t fused_backward_workspace(const AttentionCall& call) {
  Arena arena(nullptr);
  arena.take<float>(call.problem.heads_q * call.rows_q());
  return arena.used();
}

void fused_backward(const AttentionCall& call, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  auto* shifts = static_cast<float*>(context.workspace.data);
  row_shifts(call, shifts, stream);
  const bool narrow = call.problem.dim_qk <= 64 && call.problem.dim_v <= 64;
  if (call.problem.features.needs_more_than_band()) {
    narrow ? run<Narrow, true>(call, shifts, stream) : run<Broad, true>(call, shifts, stream);
  } else {
    narrow ? run<Narrow, false>(call, shifts, stream) : run<Broad, false>(call, shifts, stream);
  }
  if (call.problem.features.mask_gradient) mask_gradient(call, shifts, stream);
  if (call.dsinks != nullptr) sink_gradient(call, shifts, stream);
  clear_unused_gradients(call, stream);
}

}  // namespace tilewise::cuda::simt
