#include "core/arena.h"
#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/attention/simt/backward/peak_pairs.cuh"
#include "cuda/attention/simt/backward/sums.cuh"
#include "cuda/attention/simt/backward/tile_pairs.cuh"
#include "cuda/attention/simt/fused.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::simt {
namespace {

// Backward by recomputation. A block keeps a tile of keys and walks over the queries that see it: five
// products a pair of tiles, after two for the row states where these must be exact to the last key. dk and dv
// are summed in registers; dq is added to global memory as it comes, in whatever order. Where it must be
// repeatable a block that keeps queries and walks over keys gives dq, at the price of two products more. Both
// are one template, the two sides exchanged.

enum class Gradients {
  all,      // own: keys; dk, dv, and dq by atomic additions
  keys,     // own: keys; dk and dv
  queries,  // own: queries; dq
};
constexpr Side side_of(Gradients gradients) {
  return gradients == Gradients::queries ? Side::queries : Side::keys;
}

// What the block of that index does.
template <typename C, bool general, Gradients gradients>
__device__ __forceinline__ void differentiate_tile(const AttentionCall& call, const Blocks& blocks,
                                                   const RowStates& states, const Peaks& peaks,
                                                   const Rows& dq_sum, const SomeHeads& heads,
                                                   std::uint32_t index, float* shared) {
  constexpr Side side = side_of(gradients);
  const int piece = static_cast<int>(index % static_cast<std::uint32_t>(blocks.dim_pieces));
  const Place<C> place;
  const OwnPlace<C> own_place(place);
  const Stage<C, side, general> stage(call, shared);
  Pairs<side, general> pairs(call, blocks, index / static_cast<std::uint32_t>(blocks.dim_pieces));
  if (!heads.has_group(call, pairs.query.b, pairs.query.h / call.group())) return;
  const bool mends = !general && peaks.count != nullptr && !is_short(pairs.query.sequence);
  // Keys: dv in the first half, dk in the second. Queries: dq, half of it in each.
  float sum[C::own_each][8] = {};
  GroupSum<C> group;

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
    differentiate(stage, rules, query, keys, true, place, [&](float highest) {
      if constexpr (!general && gradients == Gradients::all) {
        if (mends && highest > peak_weight) take_peaks<C>(stage, peaks, query, keys, place);
      }
    });
    if (!stage.whole()) {
      __syncthreads();  // everyone is done with the last piece, and score gradients are there
      stage.load_other(query, keys, piece);
      if (gradients == Gradients::all) stage.load_own(query, keys, piece);
      commit_copies();
      wait_copies<0>();
      __syncthreads();  // the block's piece is there
    } else {
      __syncthreads();  // score gradients are there
    }
    if constexpr (side == Side::keys) {
      add_to_own(sum, place.second ? stage.dscores : stage.weights,
                 place.second ? stage.other : stage.other_v, query.count, own_place);
    } else {
      const int first = place.second ? C::tile / 2 : 0;
      add_to_own(sum, stage.dscores + first * C::pair_stride, stage.other + first * C::row_stride,
                 min(C::tile / 2, max(0, keys.count - first)), own_place);
    }
    __syncthreads();  // everyone is done with the other side
    more = pairs.next();
    if constexpr (general && side == Side::keys) {
      if (more && pairs.query.h != query.h) group.add(sum);
    }
    if (more && stage.whole()) {  // the next tile comes while dq is summed
      stage.load_other(pairs.query, pairs.keys, 0);
      stage.load_states(pairs.query, states);
      commit_copies();
    }
    if constexpr (!general && gradients == Gradients::all) {
      if (mends) add_others<C>(stage, peaks, query);
    }
    if constexpr (gradients == Gradients::all) {
      if (piece < stage.pieces_qk) add_dq(stage, dq_sum, query, keys, piece, place);
    }
  }

  group.join(sum);
  const QueryTile& query = pairs.query;
  const auto scale = static_cast<float>(call.scale);
  const int first_dim = piece * C::dim;
  if constexpr (side == Side::keys) {
    const Rows& rows = place.second ? call.dk : call.dv;
    const int dims = place.second ? stage.dim_qk : stage.dim_v;
    if (!rows.wanted || first_dim >= dims) return;
    store_own<C, general>(rows, sum, place.second ? scale : 1.0f, pairs.keys.count, first_dim, dims,
                          own_place, query.b, call.key_head(query.h),
                          query.sequence.first_k + pairs.keys.first);
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
    store_own<C, general>(call.dq, sum, scale, query.count, first_dim, stage.dim_qk, own_place, query.b,
                          query.h, query.sequence.first_q + query.first);
  }
}

template <typename C, bool general, Gradients gradients>
__global__ void __launch_bounds__(C::threads, C::blocks)
    fused_backward(const __grid_constant__ AttentionCall call, const Blocks blocks, const RowStates states,
                   const Peaks peaks, const Rows dq_sum) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  if constexpr (runs_in_code(C::shared_bytes)) {
    differentiate_tile<C, general, gradients>(call, blocks, states, peaks, dq_sum, {}, blockIdx.x, shared);
  }
}

// For some heads, which are often none: as many blocks as can be there at once look for something to do.
template <typename C>
__global__ void __launch_bounds__(C::threads, C::blocks)
    fused_backward_of_some(const __grid_constant__ AttentionCall call, const Blocks blocks,
                           const RowStates states, const Peaks peaks, const Rows dq_sum,
                           const SomeHeads heads, std::uint32_t count) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  if (heads.none()) return;
  if constexpr (runs_in_code(C::shared_bytes)) {
    for (std::uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
      differentiate_tile<C, false, Gradients::all>(call, blocks, states, peaks, dq_sum, heads, index, shared);
      __syncthreads();  // everyone is done with shared memory
    }
  }
}

// Whether the state of a row may come from o and lse, and its peaks be mended. That is for bulk: where keys
// or values are all the same, or the sequence is short, exactness would hang on more than the peaks.
bool from_outputs(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  return plain_backward(call) && !call.delta.wanted && call.dq.wanted && (call.dk.wanted || call.dv.wanted) &&
         !call.deterministic && !problem.features.sinks && problem.most_keys > short_keys &&
         problem.length_q >= short_queries && call.k.stride_s != 0 && call.v.stride_s != 0;
}

// The states of all queries, or of those of some heads.
void states_from_outputs(const AttentionCall& call, const RowStates& states, const Peaks& peaks,
                         const SomeHeads& heads, const Context& context) {
  row_states_of_outputs(call, states, peaks, heads, static_cast<cudaStream_t>(context.stream));
  const bool some_may_be_short = call.packed() || call.key_lengths.data != nullptr;
  if (some_may_be_short) row_states_of_short(call, states, heads, context);
}

struct Workspace {
  RowStates states;
  float* row_sums =
      nullptr;  // [Hq, rows_q]: score gradients summed over keys, where a mask has one element a row
  Rows dq_sum;  // f32, where dq is summed; dq itself where it can be
  Peaks peaks;
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
    if (from_outputs(call)) peaks = Peaks(arena, rows);
    bytes = arena.used();
  }
};

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
void run(const AttentionCall& call, const Workspace& workspace, cudaStream_t stream) {
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
       .stream = stream,
       // Where two blocks can share a multiprocessor, those that begin early do, and leave others without
       // any.
       .early = C::blocks == 1 && begins_early(problem.device)},
      call, blocks, workspace.states, workspace.peaks, workspace.dq_sum);
}

template <typename C, bool general>
void run(const AttentionCall& call, const Workspace& workspace, cudaStream_t stream) {
  const bool of_keys = call.dk.wanted || call.dv.wanted;
  if (workspace.dq_sum.wanted) return run<C, general, Gradients::all>(call, workspace, stream);
  if (call.dq.wanted) run<C, general, Gradients::queries>(call, workspace, stream);
  if (of_keys) run<C, general, Gradients::keys>(call, workspace, stream);
}

template <typename C>
void run_some(const AttentionCall& call, const Workspace& workspace, const SomeHeads& heads,
              const Context& context) {
  const AttentionProblem& problem = call.problem;
  const Blocks blocks{QueryGrid::of(call, C::tile), KeyGrid::of(call, C::tile)};
  const std::int64_t count = problem.batch * problem.heads_kv * blocks.keys.tiles;
  launch<fused_backward_of_some<C>>(
      {.name = "tilewise fused backward, some heads",
       .blocks =
           std::min<std::int64_t>(count, C::blocks * device_properties(context.device.index).multiprocessors),
       .threads = C::threads,
       .shared_bytes = C::shared_bytes,
       .stream = static_cast<cudaStream_t>(context.stream),
       .early = begins_early(context.device)},
      call, blocks, workspace.states, workspace.peaks, workspace.dq_sum, heads,
      static_cast<std::uint32_t>(count));
}

template <bool general>
void run_for(const AttentionCall& call, const Workspace& workspace, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  switch (backward_size(call, context)) {
    case BackwardSize::small: return run<Small, general>(call, workspace, stream);
    case BackwardSize::narrow: return run<Narrow, general>(call, workspace, stream);
    case BackwardSize::broad: return run<Broad, general>(call, workspace, stream);
  }
}

}  // namespace

std::size_t fused_backward_workspace(const AttentionCall& call) { return Workspace(call, nullptr).bytes; }

bool takes_some_heads(const AttentionCall& call) { return from_outputs(call); }

std::size_t some_heads_shared_bytes(std::int64_t dim) {
  return dim > Narrow::dim ? Broad::shared_bytes : Narrow::shared_bytes;
}

void fused_backward_of(const AttentionCall& call, const SomeHeads& heads, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Workspace workspace(call, context.workspace.data);
  states_from_outputs(call, workspace.states, workspace.peaks, heads, context);
  const bool broad = call.problem.dim_qk > Narrow::dim || call.problem.dim_v > Narrow::dim;
  broad ? run_some<Broad>(call, workspace, heads, context)
        : run_some<Narrow>(call, workspace, heads, context);
  mend_peaks(call, workspace.peaks, heads, stream);
  clear_unused_gradients(call, stream);
}

void fused_backward(const AttentionCall& call, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Workspace workspace(call, context.workspace.data);
  const RowStates& states = workspace.states;
  const Rows& dq_sum = workspace.dq_sum;
  if (from_outputs(call)) {
    states_from_outputs(call, states, workspace.peaks, {}, context);
  } else {
    row_states(call, states, workspace.row_sums, dq_sum, context);
  }
  plain_backward(call) ? run_for<false>(call, workspace, context) : run_for<true>(call, workspace, context);
  if (from_outputs(call)) mend_peaks(call, workspace.peaks, {}, stream);
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
