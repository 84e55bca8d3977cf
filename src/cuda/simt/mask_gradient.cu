#include "cuda/runtime/launch.cuh"
#include "cuda/simt/backward_stage.cuh"
#include "cuda/simt/row_gradients.h"

namespace tilewise::cuda::simt {
namespace {

// A block owns some elements of dmask and recomputes every score they were added to: a tile of queries by a
// tile of keys for each entry and head that shares the mask; over all tiles of queries, or of keys, where the
// mask is broadcast along them. So each element has one writer and its sum one order.

struct Blocks {
  QueryGrid queries;
  KeyGrid keys;
  std::int64_t query_tasks;  // tiles, or 1 where the mask is broadcast along queries
  std::int64_t key_tasks;
};

struct Span {
  std::int64_t first, last;
};

__device__ __forceinline__ Span span_of(const MaskView& mask, int dim, std::int64_t index,
                                        std::int64_t whole) {
  return mask.extent[dim] == 1 ? Span{0, whole} : Span{index, index + 1};
}

template <typename C>
__global__ void __launch_bounds__(C::threads, C::blocks)
    mask_gradient_tiles(const __grid_constant__ AttentionCall call, const Blocks blocks,
                        const float* shifts) {
  extern __shared__ __align__(16) float shared[];
  const MaskView& mask = call.dmask;
  const bool keeps_queries = mask.extent[2] != 1;
  const bool keeps_keys = mask.extent[3] != 1;
  std::int64_t index = blockIdx.x;
  const std::int64_t key_task = index % blocks.key_tasks;
  index /= blocks.key_tasks;
  const std::int64_t query_task = index % blocks.query_tasks;
  index /= blocks.query_tasks;
  const std::int64_t mask_h = index % mask.extent[1];
  const std::int64_t mask_b = index / mask.extent[1];
  const Span b_span = span_of(mask, 0, mask_b, call.problem.batch);
  const Span h_span = span_of(mask, 1, mask_h, call.problem.heads_q);
  const Span query_span = keeps_queries ? Span{query_task, query_task + 1} : Span{0, blocks.queries.tiles};
  const Span key_span = keeps_keys ? Span{key_task, key_task + 1} : Span{0, blocks.keys.tiles};

  const Place<C> place;
  const Stage<C, Side::keys, true> stage(call, shared);
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int each =
      C::tile * C::tile / C::threads;  // pairs of a thread, side by side with its neighbours'
  double total = 0;  // of the thread's key, query, or part of everything, where something is summed away
  Sequence whole{.length_q = call.problem.length_q, .length_k = call.problem.length_k};
  for (std::int64_t query_tile = query_span.first; query_tile < query_span.last; ++query_tile) {
    for (std::int64_t key_tile = key_span.first; key_tile < key_span.last; ++key_tile) {
      float sum[each] = {};
      for (std::int64_t b = b_span.first; b < b_span.last; ++b) {
        for (std::int64_t h = h_span.first; h < h_span.last; ++h) {
          const QueryTile query = blocks.queries.tile(call, b, h, query_tile);
          KeyTile keys = blocks.keys.tile(call, query.sequence, key_tile);
          if (keys.count <= 0 || !meets(call, query, keys)) continue;
          __syncthreads();  // everyone is done with what is overwritten
          if (stage.whole()) {
            stage.load_own(query, keys, 0);
            stage.load_other(query, keys, 0);
          }
          stage.load_states(query, shifts);
          commit_copies();
          wait_copies<0>();
          __syncthreads();  // what was loaded is there
          differentiate(stage, ScoreRules(call, b, h), query, keys, false, place);
          __syncthreads();  // score gradients are there for all
#pragma unroll
          for (int n = 0; n < each; ++n) {
            const int at = n * C::threads + thread;
            sum[n] += stage.dscores[at / C::tile * C::pair_stride + at % C::tile];
          }
        }
      }
      const KeyTile keys = blocks.keys.tile(call, whole, key_tile);
      const QueryTile query = blocks.queries.tile(call, 0, 0, query_tile);
      if (keeps_queries && keeps_keys) {
#pragma unroll
        for (int n = 0; n < each; ++n) {
          const int r = (n * C::threads + thread) / C::tile;
          const int c = thread % C::tile;
          if (r >= query.count || c >= keys.count) continue;
          store_element(mask.at(mask_b, mask_h, query.first + r, keys.first + c), mask.dtype, sum[n]);
        }
        continue;
      }
      __syncthreads();  // everyone is done with the last score gradients
#pragma unroll
      for (int n = 0; n < each; ++n) {
        const int at = n * C::threads + thread;
        stage.dscores[at / C::tile * C::pair_stride + at % C::tile] = sum[n];
      }
      __syncthreads();  // the sums are there
      const auto pair = [&](int r, int c) {
        return static_cast<double>(stage.dscores[r * C::pair_stride + c]);
      };
      if (keeps_keys) {
        for (int r = 0; thread < keys.count && r < query.count; ++r) total += pair(r, thread);
      } else {
        for (int c = 0; thread < query.count && c < keys.count; ++c) total += pair(thread, c);
      }
    }
  }
  if (keeps_queries && keeps_keys) return;
  if (keeps_keys) {
    const KeyTile keys = blocks.keys.tile(call, whole, key_task);
    if (thread < keys.count) {
      store_element(mask.at(mask_b, mask_h, 0, keys.first + thread), mask.dtype, static_cast<float>(total));
    }
  } else if (keeps_queries) {
    const QueryTile query = blocks.queries.tile(call, 0, 0, query_task);
    if (thread < query.count) {
      store_element(mask.at(mask_b, mask_h, query.first + thread, 0), mask.dtype, static_cast<float>(total));
    }
  } else {
    __syncthreads();  // tiles give way to the totals
    auto* totals = reinterpret_cast<double*>(shared);
    totals[thread] = total;
    __syncthreads();  // all totals are there
    if (thread == 0) {
      for (int n = 1; n < C::threads; ++n) total += totals[n];
      store_element(mask.at(mask_b, mask_h, 0, 0), mask.dtype, static_cast<float>(total));
    }
  }
}

// A mask whose every score is of an empty problem.
__global__ void clear_mask_gradient(const __grid_constant__ AttentionCall call) {
  const MaskView& mask = call.dmask;
  const std::int64_t size = mask.extent[0] * mask.extent[1] * mask.extent[2] * mask.extent[3];
  const std::int64_t index = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= size) return;
  const std::int64_t j = index % mask.extent[3];
  const std::int64_t i = index / mask.extent[3] % mask.extent[2];
  const std::int64_t h = index / mask.extent[3] / mask.extent[2] % mask.extent[1];
  store_element(mask.at(index / mask.extent[3] / mask.extent[2] / mask.extent[1], h, i, j), mask.dtype, 0.0f);
}

template <typename C>
void run(const AttentionCall& call, const float* shifts, cudaStream_t stream) {
  const MaskView& mask = call.dmask;
  Blocks blocks{QueryGrid::of(call, C::tile), KeyGrid::of(call, C::tile), 1, 1};
  if (mask.extent[2] != 1) blocks.query_tasks = blocks.queries.tiles;
  if (mask.extent[3] != 1) blocks.key_tasks = blocks.keys.tiles;
  launch<mask_gradient_tiles<C>>(
      {.name = "tilewise mask gradient",
       .blocks = mask.extent[0] * mask.extent[1] * blocks.query_tasks * blocks.key_tasks,
       .threads = C::threads,
       .shared_bytes = C::shared_bytes,
       .stream = stream},
      call, blocks, shifts);
}

}  // namespace

void mask_gradient(const AttentionCall& call, const float* shifts, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const AttentionProblem& problem = call.problem;
  if (problem.batch * problem.heads_q * problem.length_q * problem.length_k == 0) {
    const MaskView& mask = call.dmask;
    const std::int64_t size = mask.extent[0] * mask.extent[1] * mask.extent[2] * mask.extent[3];
    return launch<clear_mask_gradient>({.name = "tilewise clear mask gradient",
                                        .blocks = (size + 255) / 256,
                                        .threads = 256,
                                        .stream = stream},
                                       call);
  }
  switch (backward_size(call, context)) {
    case BackwardSize::small: return run<Small>(call, shifts, stream);
    case BackwardSize::narrow: return run<Narrow>(call, shifts, stream);
    case BackwardSize::broad: return run<Broad>(call, shifts, stream);
  }
}

}  // namespace tilewise::cuda::simt
