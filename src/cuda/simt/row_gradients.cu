#include "cuda/simt/row_gradients.h"

#include "cuda/runtime/launch.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda::simt {
namespace {

constexpr int warp = 32;
constexpr int threads = 256;
constexpr int rows_per_block = threads / warp;

__device__ __forceinline__ float load_at(const std::byte* row, DType dtype, std::int64_t index) {
  return load_element(row + index * static_cast<std::int64_t>(size_of(dtype)), dtype);
}

// A warp a query. Where dq will be summed, that row is made 0 on the way.
__global__ void row_shifts_kernel(const __grid_constant__ AttentionCall call, float* shifts,
                                  const Rows dq_sum) {
  const std::int64_t row = std::int64_t{blockIdx.x} * rows_per_block + threadIdx.x / warp;
  const int lane = static_cast<int>(threadIdx.x % warp);
  const std::int64_t length = call.problem.length_q;
  if (row >= call.problem.batch * call.problem.heads_q * length) return;
  const std::int64_t b = row / length / call.problem.heads_q;
  const std::int64_t h = row / length % call.problem.heads_q;
  const std::int64_t i = row % length;
  const Sequence sequence = call.sequence(b);
  if (i >= sequence.length_q) return;
  if (dq_sum.wanted) {
    auto* dq = reinterpret_cast<float*>(dq_sum.at(b, h, sequence.first_q + i));
    for (std::int64_t d = lane; d < call.problem.dim_qk; d += warp) dq[d] = 0;
  }
  const std::byte* o = call.o.at(b, h, sequence.first_q + i);
  const std::byte* d_o = call.d_o.at(b, h, sequence.first_q + i);
  float sum = 0;
  for (std::int64_t d = lane; d < call.problem.dim_v; d += warp) {
    sum = fmaf(load_at(o, call.o.dtype, d), load_at(d_o, call.d_o.dtype, d), sum);
  }
  for (int other = warp / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (lane != 0) return;
  const float d_lse =
      call.d_lse.wanted ? *reinterpret_cast<const float*>(call.d_lse.at(b, h, sequence.first_q + i)) : 0.0f;
  const bool empty =
      *reinterpret_cast<const float*>(call.lse.at(b, h, sequence.first_q + i)) == minus_infinity;
  shifts[h * call.rows_q() + call.first_row_q(b) + i] = empty ? 0.0f : d_lse - sum;
}

// A block a head; each thread sums every threads-th query, then the threads' sums are added in order.
__global__ void sink_gradient_kernel(const __grid_constant__ AttentionCall call, const float* shifts) {
  __shared__ double sums[threads];
  const std::int64_t h = blockIdx.x;
  double sum = 0;
  for (std::int64_t b = 0; b < call.problem.batch; ++b) {
    const Sequence sequence = call.sequence(b);
    const double sink = call.sinks.at(b, h);
    for (std::int64_t i = threadIdx.x; i < sequence.length_q; i += threads) {
      const float lse = *reinterpret_cast<const float*>(call.lse.at(b, h, sequence.first_q + i));
      if (lse == minus_infinity) continue;
      const float shift = shifts[h * call.rows_q() + call.first_row_q(b) + i];
      sum += static_cast<double>(expf(static_cast<float>(sink - static_cast<double>(lse))) * shift);
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();  // all sums are there
  if (threadIdx.x != 0) return;
  for (int n = 1; n < threads; ++n) sum += sums[n];
  reinterpret_cast<float*>(call.dsinks)[h * call.dsinks_stride] = static_cast<float>(sum);
}

// A block a row of a tensor: rows [first, last) of every head of entry b, or of packed rows.
struct Unused {
  Rows rows;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  bool of_queries = false;
};

__global__ void clear_unused_rows(const __grid_constant__ AttentionCall call, const Unused what) {
  const bool packed = call.packed();
  const std::int64_t capacity =
      packed ? (what.of_queries ? call.total_q : call.total_k) : call.problem.length_k;
  const std::int64_t s = blockIdx.x % capacity;
  const std::int64_t h = blockIdx.x / capacity % what.heads;
  const std::int64_t b = blockIdx.x / capacity / what.heads;
  const Indices& cumulative = what.of_queries ? call.cumulative_q : call.cumulative_k;
  const std::int64_t used = packed ? cumulative.at(call.problem.batch) : call.sequence(b).length_k;
  if (s < used) return;
  std::byte* row = what.rows.at(b, h, s);
  for (std::int64_t d = threadIdx.x; d < what.dim; d += blockDim.x) {
    store_element(row + d * static_cast<std::int64_t>(size_of(what.rows.dtype)), what.rows.dtype, 0.0f);
  }
}

__global__ void clear_unused_lse(const __grid_constant__ AttentionCall call) {
  const std::int64_t s = blockIdx.x % call.total_q;
  const std::int64_t h = blockIdx.x / call.total_q;
  if (s < call.cumulative_q.at(call.problem.batch)) return;
  *reinterpret_cast<float*>(call.lse.at(0, h, s)) = minus_infinity;
}

void clear(const AttentionCall& call, const Rows& rows, std::int64_t heads, std::int64_t dim, bool of_queries,
           cudaStream_t stream) {
  if (!rows.wanted) return;
  const std::int64_t entries = call.packed() ? 1 : call.problem.batch;
  const std::int64_t capacity =
      call.packed() ? (of_queries ? call.total_q : call.total_k) : call.problem.length_k;
  launch<clear_unused_rows>({.name = "tilewise clear unused rows",
                             .blocks = entries * heads * capacity,
                             .threads = 64,
                             .stream = stream},
                            call, Unused{rows, heads, dim, of_queries});
}

}  // namespace

void row_shifts(const AttentionCall& call, float* shifts, const Rows& dq_sum, cudaStream_t stream) {
  const std::int64_t rows = call.problem.batch * call.problem.heads_q * call.problem.length_q;
  launch<row_shifts_kernel>({.name = "tilewise row shifts",
                             .blocks = (rows + rows_per_block - 1) / rows_per_block,
                             .threads = threads,
                             .stream = stream},
                            call, shifts, dq_sum);
}

void sink_gradient(const AttentionCall& call, const float* shifts, cudaStream_t stream) {
  launch<sink_gradient_kernel>({.name = "tilewise sink gradient",
                                .blocks = call.problem.heads_q,
                                .threads = threads,
                                .stream = stream},
                               call, shifts);
}

void clear_unused_outputs(const AttentionCall& call, cudaStream_t stream) {
  if (!call.packed()) return;
  clear(call, call.o, call.problem.heads_q, call.problem.dim_v, true, stream);
  if (!call.lse.wanted) return;
  launch<clear_unused_lse>({.name = "tilewise clear unused lse",
                            .blocks = call.problem.heads_q * call.total_q,
                            .threads = 1,
                            .stream = stream},
                           call);
}

void clear_unused_gradients(const AttentionCall& call, cudaStream_t stream) {
  if (call.packed()) clear(call, call.dq, call.problem.heads_q, call.problem.dim_qk, true, stream);
  if (!call.packed() && !call.problem.features.key_lengths) return;
  clear(call, call.dk, call.problem.heads_kv, call.problem.dim_qk, false, stream);
  clear(call, call.dv, call.problem.heads_kv, call.problem.dim_v, false, stream);
}

}  // namespace tilewise::cuda::simt
