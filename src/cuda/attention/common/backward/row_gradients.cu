#include "cuda/attention/common/backward/row_gradients.h"

#include "cuda/attention/common/score.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::simt {
namespace {

constexpr int sum_threads = 256;

// A block a head; each thread sums every sum_threads-th query, then the threads' sums are added in order.
__global__ void sink_gradient_kernel(const __grid_constant__ AttentionCall call, const RowStates states) {
  __shared__ double sums[sum_threads];
  const std::int64_t h = blockIdx.x;
  double sum = 0;
  for (std::int64_t b = 0; b < call.problem.batch; ++b) {
    const double sink = call.sinks.at(b, h);
    const std::int64_t first = h * call.rows_q() + call.first_row_q(b);
    const std::int64_t length = call.sequence(b).length_q;
    for (std::int64_t row = first + threadIdx.x; row < first + length; row += sum_threads) {
      if (states.inverse[row] == 0) continue;  // saw nothing
      sum += exp(sink - static_cast<double>(states.top[row])) * static_cast<double>(states.inverse[row]) *
             static_cast<double>(states.shift[row]);
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();  // all sums are there
  if (threadIdx.x != 0) return;
  for (int n = 1; n < sum_threads; ++n) sum += sums[n];
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

void sink_gradient(const AttentionCall& call, const RowStates& states, cudaStream_t stream) {
  launch<sink_gradient_kernel>({.name = "tilewise sink gradient",
                                .blocks = call.problem.heads_q,
                                .threads = sum_threads,
                                .stream = stream},
                               call, states);
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
