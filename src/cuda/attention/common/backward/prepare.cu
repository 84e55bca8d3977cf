#include "core/reasons.h"
#include "cuda/attention/common/backward/backward.h"
#include "cuda/attention/common/backward/batch_rows.cuh"
#include "cuda/attention/common/backward/far_rows.cuh"
#include "cuda/attention/common/key_grid.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma {
namespace {

// Computes what the kernel of the gradients needs: a few numbers per query.

// Raises `largest` to the largest value of the CTA's rows. NaN counts as infinite.
__device__ void raise(int* largest, float value) {
  __shared__ int highest;
  if (threadIdx.x == 0) highest = 0;
  __syncthreads();  // `highest` is 0
  atomicMax(&highest, __float_as_int(value >= 0 ? value : -minus_infinity));
  __syncthreads();  // all threads have raised it
  if (threadIdx.x == 0) atomicMax(largest, highest);
}

// Clears the accumulator of dQ; `blocks` CTAs take part.
__device__ void clear_sums(const AttentionCall& call, const BackwardSpace& space, std::int64_t blocks) {
  if (space.dq.data == nullptr) return;
  auto* dq = reinterpret_cast<float4*>(space.dq.data);
  const std::int64_t count =
      call.problem.heads_q * space.dq.tiles * space.dq.eights * (DqAccumulator::fragment / 4);
  const std::int64_t step = blocks * row_threads;
  for (std::int64_t n = std::int64_t{blockIdx.x} * row_threads + threadIdx.x; n < count; n += step) {
    dq[n] = {};
  }
}

// Consecutive rows that a group of lanes takes. Their position is computed once, and their loads are issued
// together.
constexpr int rows_together = 4;

/// Advances from one row to the next, whose number is `index`.
__device__ __forceinline__ void advance(const AttentionCall& call, std::int64_t index, BatchRow& row) {
  if (call.packed() || row.s + 1 == call.problem.length_q) {
    row = BatchRow::of_query(call, index);
  } else {
    ++row.s;
  }
}

// The norms of V's rows, from which f16 computes the scale of dS.
template <typename T, int lanes>
__device__ void raise_value_norms(const AttentionCall& call, const BackwardSpace& space, std::int64_t block) {
  const RowLanes<lanes> at(block);
  const BatchRow row = BatchRow::of_key(call, at.row);
  const auto dims = static_cast<int>(call.problem.dim_v);
  float norm = 0;
  if (row.owned && at.lane * 8 < dims) {
    float v[8];
    load_eight<T>(v, row_of_halves(call.v, row.b, row.h, row.s), at.lane * 8, dims, aligned_chunks(call.v));
#pragma unroll
    for (int n = 0; n < 8; ++n) norm = fmaf(v[n], v[n], norm);
  }
  raise(&space.largest->v, sqrtf(at.sum(norm)));
}

// The first `query_blocks` CTAs take rows of O and dO, the others rows of V. `share`: the call is a share of
// keys, which has delta in place of O.
template <typename T, int lanes, bool share>
__global__ void __launch_bounds__(row_threads)
    row_values(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space,
               std::int64_t query_blocks) {
  join_pdl_chain();  // O, LSE, dO and dLSE are there
  if (p_scale_bits<T> > 0 && blockIdx.x >= query_blocks) {
    return raise_value_norms<T, lanes>(call, space, blockIdx.x - query_blocks);
  }
  const RowLanes<lanes> at(blockIdx.x);
  const std::int64_t first = at.row * rows_together;
  const auto dims = static_cast<int>(call.problem.dim_v);
  uint4 o[rows_together] = {}, d_o[rows_together] = {};
  if (at.lane * 8 < dims) {
    BatchRow row = BatchRow::of_query(call, first);
#pragma unroll
    for (int n = 0; n < rows_together; ++n) {
      if (n > 0) advance(call, first + n, row);
      if (!row.owned) continue;
      if constexpr (!share) {
        o[n] =
            eight_of(row_of_halves(call.o, row.b, row.h, row.s), at.lane * 8, dims, aligned_chunks(call.o));
      }
      d_o[n] =
          eight_of(row_of_halves(call.d_o, row.b, row.h, row.s), at.lane * 8, dims, aligned_chunks(call.d_o));
    }
  }
  clear_sums(call, space, query_blocks);
  float product = 0;  // delta of the row whose numbers this lane writes
  float largest = 0;
#pragma unroll
  for (int n = 0; n < rows_together; ++n) {
    float o_own[8], d_o_own[8];
    unpack_eight<T>(o_own, o[n]);
    unpack_eight<T>(d_o_own, d_o[n]);
    float sum = 0, norm = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      sum = fmaf(o_own[e], d_o_own[e], sum);
      norm = fmaf(d_o_own[e], d_o_own[e], norm);
    }
    sum = at.sum(sum);
    if (at.lane == n) product = sum;
    if (p_scale_bits<T> > 0) {
      norm = at.sum(norm);
      largest = norm > largest || norm != norm ? norm : largest;
    }
  }
  const std::int64_t index = first + at.lane;
  BatchRow row{.owned = false};
  if (at.lane < rows_together) row = BatchRow::of_query(call, index);
  const float d_lse = row.owned ? d_lse_of(call, row) : 0.0f;
  if (p_scale_bits<T> > 0) {
    raise(&space.largest->d_o, sqrtf(largest));
    __syncthreads();  // `highest` was read
    raise(&space.largest->d_lse, fabsf(d_lse));
    if (call.problem.features.logit_scale) {
      __syncthreads();  // `highest` was read
      raise(&space.largest->logit, row.owned ? fabsf(logit_factor<T>(call, row.h).factor) : 0.0f);
    }
  }
  if (!row.owned) return;
  if constexpr (share) product = *reinterpret_cast<const float*>(call.delta.at(row.b, row.h, row.s));
  const RowValues& rows = space.rows;
  const float lse = *reinterpret_cast<const float*>(call.lse.at(row.b, row.h, row.s));
  const bool unseen = lse == minus_infinity;
  const bool general = rows.offset != nullptr;
  rows.lse[index] = unseen ? -minus_infinity : general ? lse : lse * log2e;
  if (general) rows.offset[index] = 0;
  rows.minus_delta[index] = unseen ? 0.0f : d_lse - product;
}

template <typename T>
__global__ void __launch_bounds__(row_threads)
    anchor_rows(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  join_pdl_chain();  // row_values() has written the rows
  const RowLanes<32> at(blockIdx.x);
  const BatchRow row = BatchRow::of_query(call, at.row);
  if (!row.owned || !is_far(*reinterpret_cast<const float*>(call.lse.at(row.b, row.h, row.s)))) return;
  const auto [b, i] = row.in_sequence(call);
  const FarSoftmax softmax = far_softmax<T>(call, b, row.h, i, at.lane);
  if (at.lane != 0 || !(softmax.sum > 0)) return;
  space.rows.lse[at.row] = softmax.top;
  space.rows.offset[at.row] = -log2f(softmax.sum);
}

/// One warp per row of query blocks: sets the row's bit in the words of all key blocks that it lists.
__global__ void __launch_bounds__(row_threads)
    mark_seen_blocks(const __grid_constant__ AttentionCall call, const SeenBlocks seen, std::int64_t rows) {
  join_pdl_chain();  // the bits are 0
  const std::int64_t row = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const std::int64_t heads = call.problem.heads_q;
  const std::int64_t b = row / rows / heads, h = row / rows % heads, qb = row % rows;
  if (b >= call.problem.batch) return;
  const auto mark = [&](std::int32_t count, const Indices& indices) {
    for (int slot = static_cast<int>(threadIdx.x % 32); slot < count; slot += 32) {
      const std::int64_t kb = indices.at(b, h, qb, slot);
      if (kb < 0 || kb >= seen.key_blocks) continue;
      atomicOr(seen.of(call, b, h, kb) + qb / 32, 1u << qb % 32);
    }
  };
  mark(call.blocks.count(b, h, qb), call.blocks.indices);
  if (call.blocks.full_counts.data == nullptr) return;
  mark(call.blocks.full_count(b, h, qb), call.blocks.full_indices);
}

void mark_seen_blocks_of(const AttentionCall& call, const SeenBlocks& seen, cudaStream_t stream) {
  if (seen.bits == nullptr || seen.count == 0) return;
  check_cuda(cudaMemsetAsync(seen.bits, 0, static_cast<std::size_t>(seen.count) * 4, stream),
             "tilewise mma backward");
  const std::int64_t rows = SeenBlocks::query_blocks(call);
  launch<mark_seen_blocks>(
      {.name = "tilewise mma backward, blocks",
       .blocks = (call.problem.batch * call.problem.heads_q * rows * 32 + row_threads - 1) / row_threads,
       .threads = row_threads,
       .stream = stream},
      call, seen, rows);
}

template <typename T, int lanes>
void prepare(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream) {
  const AttentionFeatures& features = call.problem.features;
  const std::int64_t queries = call.problem.heads_q * call.rows_q();
  const std::int64_t query_blocks = RowLanes<lanes>::blocks((queries + rows_together - 1) / rows_together);
  std::int64_t value_blocks = 0;
  if constexpr (p_scale_bits<T> > 0) {
    check_cuda(cudaMemsetAsync(space.largest, 0, sizeof(Largest), stream), "tilewise mma backward");
    value_blocks = RowLanes<lanes>::blocks(call.problem.heads_kv * call.rows_k());
  }
  mark_seen_blocks_of(call, space.seen, stream);
  if (space.order.kept()) {
    check_cuda(cudaMemsetAsync(space.order.ticket, 0, space.order.bytes, stream), "tilewise mma backward");
  }
  const Launch how{.name = "tilewise mma backward, rows",
                   .blocks = query_blocks + value_blocks,
                   .threads = row_threads,
                   .stream = stream,
                   .early = value_blocks == 0 && !space.order.kept() && has_pdl(call.problem.device)};
  call.delta.wanted ? launch<row_values<T, lanes, true>>(how, call, space, query_blocks)
                    : launch<row_values<T, lanes, false>>(how, call, space, query_blocks);
  if (features.mask != MaskKind::additive && !features.alibi) return;
  launch<anchor_rows<T>>({.name = "tilewise mma backward, far rows",
                          .blocks = RowLanes<32>::blocks(queries),
                          .threads = row_threads,
                          .stream = stream,
                          .early = has_pdl(call.problem.device)},
                         call, space);
}

}  // namespace

std::string unsuited_backward(const AttentionProblem& problem) {
  if (problem.layout == Layout::paged) return "paged keys have no backward";
  // dS of equal keys sums to 0, and so does dS of an only key. Here it would be the difference of dP and
  // delta, which is their rounding error.
  if (problem.backward.repeated_keys) return "backward does not support keys or values that repeat one row";
  if (problem.most_keys <= 1) return "backward " + needs("at least 2 keys per query", problem.most_keys);
  // delta has the rounding error of O. Where one key has nearly all of a row's weight, dS is no larger than
  // that error. If there are few rows, all may be of this kind, and nothing averages out. PyTorch's path
  // computes delta from P and dP. Of 2,200 random problems, ten failed without the higher limits: for block
  // masks, dropout, key lengths and short packed sequences, which leave many rows few keys, and for the
  // gradient of a logit scale, which is one sum over all rows.
  const AttentionFeatures& features = problem.features;
  constexpr std::int64_t few_keys = 8;
  if (problem.layout == Layout::packed && !problem.batch_invariant &&
      problem.keys < few_keys * problem.batch) {
    return "backward " + needs("at least " + std::to_string(few_keys * problem.batch) + " keys in " +
                                   std::to_string(problem.batch) + " packed sequences",
                               problem.keys);
  }
  const bool leaves_few = features.block_mask || features.dropout || features.key_lengths;
  const std::int64_t few_rows = features.logit_scale ? 2048 : leaves_few ? 1024 : 128;
  const std::int64_t rows = problem.heads_q * problem.queries;
  // A batch_invariant call has the kernel that it would have among many sequences.
  if (rows < few_rows && !problem.batch_invariant) {
    return "backward " + needs("at least " + std::to_string(few_rows) + " query rows in total", rows);
  }
  if (problem.strict) return "backward rounds P and dS to 16 bits, which strict precision does not allow";
  return {};
}

void prepare_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context) {
  with_lanes(call, [&]<typename T, int lanes>() {
    prepare<T, lanes>(call, space, static_cast<cudaStream_t>(context.stream));
  });
}

}  // namespace tilewise::cuda::mma
