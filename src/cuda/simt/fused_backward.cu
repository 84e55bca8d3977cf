#include "core/arena.h"
#include "cuda/ptx/reduce.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/simt/fused.h"
#include "cuda/simt/row_gradients.h"
#include "cuda/simt/tile_pairs.cuh"

namespace tilewise::cuda::simt {
namespace {

// Backward by recomputation. A block keeps a tile of keys and walks over the queries that see it: five
// products a pair of tiles, after the two of the row states. dk and dv are summed in registers; dq is added
// to global memory as it comes, in whatever order. Where it must be repeatable a block that keeps queries and
// walks over keys gives dq, at the price of two products more. Both are one template, the two sides
// exchanged.

enum class Gradients {
  all,      // own: keys; dk, dv, and dq by atomic additions
  keys,     // own: keys; dk and dv
  queries,  // own: queries; dq
};
constexpr Side side_of(Gradients gradients) {
  return gradients == Gradients::queries ? Side::queries : Side::keys;
}

// Where the sums of a lane are in [own, piece] of its half's gradient: 8 x 8, or 4 x 8 of small tiles.
template <typename C>
struct OwnPlace {
  int rows, dims;  // the lane's first, in fours
  __device__ explicit OwnPlace(const Place<C>& place)
      : rows(place.in_half % 2 * C::R + place.lane.row), dims(place.in_half / 2 * 16 + place.lane.column) {}
  __device__ int row(int m) const { return in_runs<2 * C::R>(rows, m); }
  __device__ int dim(int n) const { return in_runs<C::C>(dims, n); }
};

template <typename C>
__device__ __forceinline__ void add_to_own(float (&sum)[C::own_each][8], const float* pairs,
                                           const float* rows, int count, const OwnPlace<C>& at) {
  multiply_turned(sum, Turned<C::pair_stride, 2 * C::R>{pairs + at.rows * 4},
                  Turned<C::row_stride, C::C>{rows + at.dims * 4}, (count + 7) / 8 * 8);
}

template <typename C>
__device__ __forceinline__ void store_own(const Rows& rows, const float (&sum)[C::own_each][8], float factor,
                                          int valid, int first_dim, int dims, const OwnPlace<C>& at,
                                          std::int64_t b, std::int64_t h, std::int64_t first_row) {
  const bool aligned = aligned_rows(rows, dims);
#pragma unroll
  for (int m = 0; m < C::own_each; ++m) {
    const int r = at.row(m);
    if (r >= valid) continue;
    std::byte* to = rows.at(b, h, first_row + r) + first_dim * size_of(rows.dtype);
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
      store_chunk(
          to, rows.dtype, at.dim(n), dims - first_dim, aligned,
          {factor * sum[m][n], factor * sum[m][n + 1], factor * sum[m][n + 2], factor * sum[m][n + 3]});
    }
  }
}

// dq += dscores · k, by all warps: a quarter of the queries and 64 dims each.
template <typename C, bool general>
__device__ __forceinline__ void add_dq(const Stage<C, Side::keys, general>& stage, const Rows& dq_sum,
                                       const QueryTile& query, const KeyTile& keys, int piece,
                                       const Place<C>& place) {
  constexpr int rows_each = C::tile / 16;
  const int first_row = place.warp % 4 * (C::tile / 4);
  const int first_dim = place.warp / 4 * 64;
  float dq[rows_each][8] = {};
  multiply_rows_turned(
      dq, ByRows<C::pair_stride, C::R>{stage.dscores + (first_row + place.lane.row) * C::pair_stride},
      Turned<C::row_stride, C::C>{stage.own + first_dim + place.lane.column * 4}, (keys.count + 7) / 8 * 8);
  const auto scale = static_cast<float>(stage.call.scale);
  const int dims = stage.dims_qk(piece);
  const bool aligned = aligned_rows(dq_sum, stage.dim_qk);
  const std::int64_t s = query.sequence.first_q + query.first;
#pragma unroll
  for (int m = 0; m < rows_each; ++m) {
    const int r = first_row + in_steps<C::R>(place.lane.row, m);
    if (r >= query.count) continue;
    auto* to = reinterpret_cast<float*>(dq_sum.at(query.b, query.h, s + r)) + piece * C::dim;
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
      const int d = first_dim + in_runs<C::C>(place.lane.column, n);
      if (d >= dims) continue;
      if (aligned) {
        add_4(to + d, {scale * dq[m][n], scale * dq[m][n + 1], scale * dq[m][n + 2], scale * dq[m][n + 3]});
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (d + k < dims) atomicAdd(to + d + k, scale * dq[m][n + k]);
        }
      }
    }
  }
}

// The error of a running sum grows with its length, so every few tiles the sums of a block are added up in
// memory and begun anew. `parked` is [blocks, own_each · 2, threads] of four floats, each its own thread's
// alone.
constexpr int patience = 8;

template <typename C>
__device__ __forceinline__ float* parked_at(float* parked, int n) {
  return parked + ((std::int64_t{blockIdx.x} * (C::own_each * 2) + n) * C::threads + threadIdx.x) * 4;
}

template <typename C>
__device__ __forceinline__ void park(float (&sum)[C::own_each][8], float* parked, bool first) {
#pragma unroll
  for (int m = 0; m < C::own_each; ++m) {
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
      const float4 four{sum[m][n], sum[m][n + 1], sum[m][n + 2], sum[m][n + 3]};
      float* at = parked_at<C>(parked, m * 2 + n / 4);
      if (first) {
        *reinterpret_cast<float4*>(at) = four;
      } else {
        add_4(at, four);  // nothing to wait for
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[m][n + k] = 0;
    }
  }
}

template <typename C>
__device__ __forceinline__ void fetch(float (&sum)[C::own_each][8], float* parked) {
#pragma unroll
  for (int m = 0; m < C::own_each; ++m) {
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
      const auto* at = reinterpret_cast<const float4*>(parked_at<C>(parked, m * 2 + n / 4));
      const float4 four = __ldcg(at);  // where add_4 added
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[m][n + k] += element(four, k);
    }
  }
}

template <typename C, bool general, Gradients gradients>
__global__ void __launch_bounds__(C::threads, C::blocks)
    fused_backward(const __grid_constant__ AttentionCall call, const Blocks blocks, const RowStates states,
                   const Rows dq_sum, float* parked) {
  constexpr Side side = side_of(gradients);
  extern __shared__ __align__(16) float shared[];
  const int piece = static_cast<int>(blockIdx.x % blocks.dim_pieces);
  const Place<C> place;
  const OwnPlace<C> own_place(place);
  const Stage<C, side, general> stage(call, shared);
  Pairs<side, general> pairs(call, blocks, blockIdx.x / blocks.dim_pieces);
  // Keys: dv in the first half, dk in the second. Queries: dq, half of it in each.
  float sum[C::own_each][8] = {};
  int tiles = 0;

  bool more = pairs.next();
  if (more && stage.whole()) {
    stage.load_own(pairs.query, pairs.keys, 0);
    stage.load_other(pairs.query, pairs.keys, 0);
    stage.load_states(pairs.query, states);
    commit_copies();
  }
  while (more) {
    const QueryTile query = pairs.query;
    const KeyTile keys = pairs.keys;
    if (!stage.whole()) {
      __syncthreads();  // everyone is done with the last states
      stage.load_states(query, states);
      commit_copies();
    }
    wait_copies<0>();
    __syncthreads();  // what was loaded is there
    const ScoreRules rules(call, query.b, query.h);
    differentiate(stage, rules, query, keys, true, place);
    if (!stage.whole()) {
      __syncthreads();  // everyone is done with the last piece, and score gradients are there
      stage.load_other(query, keys, piece);
      if (gradients == Gradients::all) stage.load_own(query, keys, piece);
      commit_copies();
      wait_copies<0>();
      __syncthreads();  // the block's piece is there
    }
    if constexpr (side == Side::keys) {
      add_to_own(sum, place.second ? stage.dscores : stage.weights,
                 place.second ? stage.other : stage.other_v, query.count, own_place);
    } else {
      if (stage.whole()) __syncthreads();  // score gradients are there
      const int first = place.second ? C::tile / 2 : 0;
      add_to_own(sum, stage.dscores + first * C::pair_stride, stage.other + first * C::row_stride,
                 min(C::tile / 2, max(0, keys.count - first)), own_place);
    }
    __syncthreads();  // everyone is done with the other side, and score gradients are there for all
    more = pairs.next();
    if (++tiles % patience == 0 && more) park<C>(sum, parked, tiles == patience);
    if (more && stage.whole()) {  // the next tile comes while dq is summed
      stage.load_other(pairs.query, pairs.keys, 0);
      stage.load_states(pairs.query, states);
      commit_copies();
    }
    if constexpr (gradients == Gradients::all) {
      if (piece < stage.pieces_qk) add_dq(stage, dq_sum, query, keys, piece, place);
    }
  }

  if (tiles > patience) fetch<C>(sum, parked);
  const QueryTile& query = pairs.query;
  const auto scale = static_cast<float>(call.scale);
  const int first_dim = piece * C::dim;
  if constexpr (side == Side::keys) {
    const Rows& rows = place.second ? call.dk : call.dv;
    const int dims = place.second ? stage.dim_qk : stage.dim_v;
    if (!rows.wanted || first_dim >= dims) return;
    store_own(rows, sum, place.second ? scale : 1.0f, pairs.keys.count, first_dim, dims, own_place, query.b,
              query.h / call.group(), query.sequence.first_k + pairs.keys.first);
  } else {
    float* partial = stage.own;  // [own_each, 8, half]: where the halves' sums meet
    const int thread = static_cast<int>(threadIdx.x) % (C::threads / 2);
    __syncthreads();  // everyone is done with the place
#pragma unroll
    for (int m = 0; m < C::own_each; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (place.second) partial[(m * 8 + n) * (C::threads / 2) + thread] = sum[m][n];
      }
    }
    __syncthreads();  // the second half's sums are there
    if (place.second) return;
#pragma unroll
    for (int m = 0; m < C::own_each; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) sum[m][n] += partial[(m * 8 + n) * (C::threads / 2) + thread];
    }
    store_own(call.dq, sum, scale, query.count, first_dim, stage.dim_qk, own_place, query.b, query.h,
              query.sequence.first_q + query.first);
  }
}

// Sums of dq to its type.
__global__ void narrow_dq(const __grid_constant__ AttentionCall call, const Rows dq_sum) {
  const std::int64_t dim = call.problem.dim_qk;
  const std::int64_t index = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t row = index / dim;
  if (row >= call.problem.heads_q * call.rows_q()) return;
  const std::int64_t h = row / call.rows_q();
  const std::int64_t b = call.packed() ? 0 : row % call.rows_q() / call.problem.length_q;
  const std::int64_t s = call.packed() ? row % call.rows_q() : row % call.rows_q() % call.problem.length_q;
  if (call.packed() && s >= call.cumulative_q.at(call.problem.batch)) return;  // nobody's
  store_element(call.dq.at(b, h, s) + index % dim * static_cast<std::int64_t>(size_of(call.dq.dtype)),
                call.dq.dtype, reinterpret_cast<const float*>(dq_sum.at(b, h, s))[index % dim]);
}

template <typename C, bool general, Gradients gradients>
void run(const AttentionCall& call, const RowStates& states, const Rows& dq_sum, float* parked,
         cudaStream_t stream) {
  const AttentionProblem& problem = call.problem;
  const auto pieces = [](std::int64_t dim) { return static_cast<int>((dim + C::dim - 1) / C::dim); };
  const bool of_queries = gradients == Gradients::queries;
  const Blocks blocks{QueryGrid::of(call, C::tile), KeyGrid::of(call, C::tile),
                      of_queries ? pieces(problem.dim_qk) : pieces(std::max(problem.dim_qk, problem.dim_v))};
  launch<fused_backward<C, general, gradients>>(
      {.name = of_queries ? "tilewise fused backward, queries" : "tilewise fused backward, keys",
       .blocks = problem.batch * blocks.dim_pieces *
                 (of_queries ? problem.heads_q * blocks.queries.tiles : problem.heads_kv * blocks.keys.tiles),
       .threads = C::threads,
       .shared_bytes = C::shared_bytes,
       .stream = stream},
      call, blocks, states, dq_sum, parked);
}

template <typename C, bool general>
void run(const AttentionCall& call, const RowStates& states, const Rows& dq_sum, float* parked,
         cudaStream_t stream) {
  const bool of_keys = call.dk.wanted || call.dv.wanted;
  if (dq_sum.wanted) return run<C, general, Gradients::all>(call, states, dq_sum, parked, stream);
  if (call.dq.wanted) run<C, general, Gradients::queries>(call, states, dq_sum, parked, stream);
  if (of_keys) run<C, general, Gradients::keys>(call, states, dq_sum, parked, stream);
}

template <bool general>
void run_for(const AttentionCall& call, const RowStates& states, const Rows& dq_sum, float* parked,
             const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  switch (backward_size(call, context)) {
    case BackwardSize::small: return run<Small, general>(call, states, dq_sum, parked, stream);
    case BackwardSize::narrow: return run<Narrow, general>(call, states, dq_sum, parked, stream);
    case BackwardSize::broad: return run<Broad, general>(call, states, dq_sum, parked, stream);
  }
}

// At most, over configurations and kernels: two floats for every row kept and every dim of a padded piece.
std::int64_t parked_floats(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  const std::int64_t padded =
      dim <= Narrow::dim ? Narrow::dim : (dim + Broad::dim - 1) / Broad::dim * Broad::dim;
  const auto tiles = [](const auto& grid) { return grid.tiles; };
  std::int64_t rows = 0;
  if (call.group() * tiles(QueryGrid::of(call, Small::tile)) > patience) {
    rows = problem.batch * problem.heads_kv * tiles(KeyGrid::of(call, Narrow::tile)) * Narrow::tile;
  }
  const bool own_queries = call.dq.wanted && (call.deterministic || !(call.dk.wanted || call.dv.wanted));
  if (own_queries && tiles(KeyGrid::of(call, Small::tile)) > patience) {
    rows = std::max(
        rows, problem.batch * problem.heads_q * tiles(QueryGrid::of(call, Narrow::tile)) * Narrow::tile);
  }
  return 2 * rows * padded;
}

struct Workspace {
  RowStates states;
  float* row_sums =
      nullptr;  // [Hq, rows_q]: score gradients summed over keys, where a mask has one element a row
  Rows dq_sum;  // f32, where dq is summed; dq itself where it can be
  float* parked = nullptr;
  std::size_t bytes;

  Workspace(const AttentionCall& call, void* data) {
    Arena arena(data);
    const std::int64_t rows = call.problem.heads_q * call.rows_q();
    states = {arena.take<float>(rows), arena.take<float>(rows), arena.take<float>(rows)};
    if (sums_rows(call)) row_sums = arena.take<float>(rows);
    // dq alone is cheaper without the products of the keys.
    if (call.dq.wanted && (call.dk.wanted || call.dv.wanted) && !call.deterministic) {
      dq_sum = call.dq;
      if (call.dq.dtype != DType::f32) {
        const std::int64_t stride = (call.problem.dim_qk + 3) / 4 * 4;
        dq_sum = {.data = reinterpret_cast<std::byte*>(arena.take<float>(rows * stride)),
                  .dtype = DType::f32,
                  .stride_b = call.packed() ? 0 : call.problem.length_q * stride,
                  .stride_h = call.rows_q() * stride,
                  .stride_s = stride,
                  .wanted = true};
      }
    }
    if (const std::int64_t floats = parked_floats(call); floats > 0) parked = arena.take<float>(floats);
    bytes = arena.used();
  }
};

}  // namespace

std::size_t fused_backward_workspace(const AttentionCall& call) { return Workspace(call, nullptr).bytes; }

void fused_backward(const AttentionCall& call, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Workspace workspace(call, context.workspace.data);
  const RowStates& states = workspace.states;
  const Rows& dq_sum = workspace.dq_sum;
  row_states(call, states, workspace.row_sums, dq_sum, context);
  plain_backward(call) ? run_for<false>(call, states, dq_sum, workspace.parked, context)
                       : run_for<true>(call, states, dq_sum, workspace.parked, context);
  if (dq_sum.wanted && dq_sum.data != call.dq.data) {
    launch<narrow_dq>({.name = "tilewise narrow dq",
                       .blocks = (call.problem.heads_q * call.rows_q() * call.problem.dim_qk + 255) / 256,
                       .threads = 256,
                       .stream = stream},
                      call, dq_sum);
  }
  if (call.problem.features.mask_gradient) mask_gradient(call, states, workspace.row_sums, context);
  if (call.dsinks != nullptr) sink_gradient(call, states, stream);
  clear_unused_gradients(call, stream);
}

}  // namespace tilewise::cuda::simt
