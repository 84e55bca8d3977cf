#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/attention/simt/backward/stage.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::simt {
namespace {

// dmask: dS summed over what the mask was broadcast along. A CTA owns a tile of dmask and recomputes dS of
// every pair that these elements were added to: one tile of queries by keys for each entry and head that
// shares the mask, and for all tiles of queries if the mask is broadcast along queries. If it is broadcast
// along keys, the row sums of row_states are enough. Each element has one writer, so its sum has one order.

constexpr int row_threads = 128;

struct MaskBlocks {
  QueryGrid queries;
  KeyGrid keys;
  std::int64_t query_tasks;  // query tiles of dmask: 1 where the mask is broadcast along queries
};

// Indices [first, last) of a dimension that an element of dmask sums over.
struct Span {
  std::int64_t first, last;
};

__device__ __forceinline__ Span span_of(const MaskView& mask, int dim, std::int64_t index,
                                        std::int64_t whole) {
  return mask.extent[dim] == 1 ? Span{0, whole} : Span{index, index + 1};
}

// A sum that keeps its rounding errors in a second sum (TwoSum).
struct CompensatedSum {
  float sum = 0;
  float error = 0;
  __device__ void add(float value) {
    const float next = __fadd_rn(sum, value);
    const float added = __fsub_rn(next, sum);
    error += __fadd_rn(__fsub_rn(sum, __fsub_rn(next, added)), __fsub_rn(value, added));
    sum = next;
  }
};

template <typename C>
__global__ void __launch_bounds__(C::threads, C::blocks)
    mask_gradient_tiles(const __grid_constant__ AttentionCall call, const MaskBlocks blocks,
                        const RowStates states) {
  if constexpr (runs_in_code(C::shared_bytes)) {
    TILEWISE_DYNAMIC_SHARED(float, shared, 16);
    const MaskView& mask = call.dmask;
    const bool keeps_queries = mask.extent[2] != 1;
    std::int64_t index = blockIdx.x;
    const std::int64_t key_tile = index % blocks.keys.tiles;
    index /= blocks.keys.tiles;
    const std::int64_t query_task = index % blocks.query_tasks;
    index /= blocks.query_tasks;
    const std::int64_t mask_h = index % mask.extent[1];
    const std::int64_t mask_b = index / mask.extent[1];
    const Span b_span = span_of(mask, 0, mask_b, call.problem.batch);
    const Span h_span = span_of(mask, 1, mask_h, call.problem.heads_q);
    const Span query_span = keeps_queries ? Span{query_task, query_task + 1} : Span{0, blocks.queries.tiles};

    const Place<C> place;
    const Stage<C, Side::keys, true> stage(call, shared);
    const int thread = static_cast<int>(threadIdx.x);
    constexpr int each = C::tile * C::tile / C::threads;  // pairs per thread
    const auto pair = [&](int n) -> float& {
      const int at = n * C::threads + thread;
      return stage.ds[at / C::tile * C::pair_stride + at % C::tile];
    };
    const Sequence whole{.length_q = call.problem.length_q, .length_k = call.problem.length_k};
    const KeyTile all_keys = blocks.keys.tile(call, whole, key_tile);
    double total = 0;  // of the thread's key, where the mask is broadcast along queries
    for (std::int64_t query_tile = query_span.first; query_tile < query_span.last; ++query_tile) {
      CompensatedSum sums[each];
      for (std::int64_t b = b_span.first; b < b_span.last; ++b) {
        for (std::int64_t h = h_span.first; h < h_span.last; ++h) {
          const QueryTile query = blocks.queries.tile(call, b, h, query_tile);
          KeyTile keys = blocks.keys.tile(call, query.sequence, key_tile);
          if (keys.count <= 0 || !meets<true>(call, query, keys)) continue;
          __syncthreads();  // all threads have read dS and the tiles, which are overwritten now
          if (stage.whole()) {
            stage.load_own(query, keys, 0);
            stage.load_other(query, keys, 0);
          }
          stage.load_states(query, states);
          commit_copies();
          wait_copies<0>();
          __syncthreads();  // all threads' copies have arrived
          differentiate(stage, ScoreRule(call, b, h), query, keys, false, place, [](float) {});
          __syncthreads();  // dS is stored
#pragma unroll
          for (int n = 0; n < each; ++n) sums[n].add(pair(n));
        }
      }
      const QueryTile query = blocks.queries.tile(call, 0, 0, query_tile);
      if (keeps_queries) {
#pragma unroll
        for (int n = 0; n < each; ++n) {
          const int r = (n * C::threads + thread) / C::tile;
          const int c = thread % C::tile;
          if (r >= query.count || c >= all_keys.count) continue;
          store_element(mask.at(mask_b, mask_h, query.first + r, all_keys.first + c), mask.dtype,
                        sums[n].sum + sums[n].error);
        }
      } else {
        __syncthreads();  // all threads have read the last dS, which the sums overwrite
#pragma unroll
        for (int n = 0; n < each; ++n) pair(n) = sums[n].sum + sums[n].error;
        __syncthreads();  // the sums are stored
        for (int r = 0; thread < all_keys.count && r < query.count; ++r) {
          total += static_cast<double>(stage.ds[r * C::pair_stride + thread]);
        }
      }
    }
    if (!keeps_queries && thread < all_keys.count) {
      store_element(mask.at(mask_b, mask_h, 0, all_keys.first + thread), mask.dtype,
                    static_cast<float>(total));
    }
  }
}

// A mask with one element per row of S. One CTA per element sums over the rows that share it.
__global__ void mask_gradient_rows(const __grid_constant__ AttentionCall call, const float* row_sums) {
  __shared__ double sums[row_threads];
  const MaskView& mask = call.dmask;
  const std::int64_t mask_i = blockIdx.x % mask.extent[2];
  const std::int64_t mask_h = blockIdx.x / mask.extent[2] % mask.extent[1];
  const std::int64_t mask_b = blockIdx.x / mask.extent[2] / mask.extent[1];
  const Span b_span = span_of(mask, 0, mask_b, call.problem.batch);
  const Span h_span = span_of(mask, 1, mask_h, call.problem.heads_q);
  const Span i_span = span_of(mask, 2, mask_i, call.problem.length_q);
  double sum = 0;
  for (std::int64_t b = b_span.first; b < b_span.last; ++b) {
    for (std::int64_t h = h_span.first; h < h_span.last; ++h) {
      const float* rows = row_sums + h * call.rows_q() + call.first_row_q(b);
      for (std::int64_t i = i_span.first + threadIdx.x; i < i_span.last; i += row_threads) {
        sum += static_cast<double>(rows[i]);
      }
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();  // all threads' sums are stored
  if (threadIdx.x != 0) return;
  for (int n = 1; n < row_threads; ++n) sum += sums[n];
  store_element(mask.at(mask_b, mask_h, mask_i, 0), mask.dtype, static_cast<float>(sum));
}

// dmask of a problem without pairs: 0.
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
void run(const AttentionCall& call, const RowStates& states, cudaStream_t stream) {
  const MaskView& mask = call.dmask;
  MaskBlocks blocks{QueryGrid::of(call, C::tile), KeyGrid::of(call, C::tile), 1};
  if (mask.extent[2] != 1) blocks.query_tasks = blocks.queries.tiles;
  launch<mask_gradient_tiles<C>>(
      {.name = "tilewise mask gradient",
       .blocks = mask.extent[0] * mask.extent[1] * blocks.query_tasks * blocks.keys.tiles,
       .threads = C::threads,
       .shared_bytes = C::shared_bytes,
       .stream = stream},
      call, blocks, states);
}

}  // namespace

void mask_gradient(const AttentionCall& call, const RowStates& states, const float* row_sums,
                   const Context& context) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t(&extent)[4] = call.dmask.extent;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  if (problem.batch * problem.heads_q * problem.length_q * problem.length_k == 0) {
    return launch<clear_mask_gradient>({.name = "tilewise clear mask gradient",
                                        .blocks = (extent[0] * extent[1] * extent[2] * extent[3] + 255) / 256,
                                        .threads = 256,
                                        .stream = stream},
                                       call);
  }
  if (row_sums != nullptr) {
    return launch<mask_gradient_rows>({.name = "tilewise mask gradient",
                                       .blocks = extent[0] * extent[1] * extent[2],
                                       .threads = row_threads,
                                       .stream = stream},
                                      call, row_sums);
  }
  switch (backward_size(call, context)) {
    case BackwardSize::small: return run<Small>(call, states, stream);
    case BackwardSize::narrow: return run<Narrow>(call, states, stream);
    case BackwardSize::broad: return run<Broad>(call, states, stream);
  }
}

}  // namespace tilewise::cuda::simt
