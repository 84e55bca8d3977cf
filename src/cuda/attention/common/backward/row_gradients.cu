#include "cuda/attention/common/backward/row_gradients.h"

#include "cuda/attention/common/score.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::simt {
namespace {

constexpr int sum_threads = 256;

// The sum of value(b, row) over all queries of head h, whose rows are those of [Hq, rows_q], in the first
// thread of a CTA. Each thread sums every sum_threads-th query, then the threads' sums are added in order.
template <typename Value>
__device__ double sum_of_head(const AttentionCall& call, std::int64_t h, const Value& value) {
  __shared__ double sums[sum_threads];
  double sum = 0;
  for (std::int64_t b = 0; b < call.problem.batch; ++b) {
    const std::int64_t first = h * call.rows_q() + call.first_row_q(b);
    const std::int64_t length = call.sequence(b).length_q;
    for (std::int64_t row = first + threadIdx.x; row < first + length; row += sum_threads) {
      sum += value(b, row);
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();  // the sums of all threads are there
  for (int n = 1; threadIdx.x == 0 && n < sum_threads; ++n) sum += sums[n];
  return sum;
}

__global__ void sink_gradient_kernel(const __grid_constant__ AttentionCall call, const RowStates states) {
  const std::int64_t h = blockIdx.x;
  const double sum = sum_of_head(call, h, [&](std::int64_t b, std::int64_t row) {
    if (states.inverse[row] == 0) return 0.0;  // it sees no key
    return exp(call.sinks.at(b, h) - static_cast<double>(states.top[row])) *
           static_cast<double>(states.inverse[row]) * static_cast<double>(states.shift[row]);
  });
  if (threadIdx.x != 0) return;
  reinterpret_cast<float*>(call.dsinks)[h * call.dsinks_stride] = static_cast<float>(sum);
}

__global__ void logit_scale_kernel(const __grid_constant__ AttentionCall call, const float* rows) {
  const std::int64_t h = blockIdx.x;
  const double sum =
      sum_of_head(call, h, [&](std::int64_t, std::int64_t row) { return static_cast<double>(rows[row]); });
  if (threadIdx.x != 0) return;
  reinterpret_cast<float*>(call.dlogit_scale)[h * call.dlogit_scale_stride] = static_cast<float>(sum);
}

// One warp per query. Rows that no sequence owns are not read afterwards.
__global__ void logit_scale_rows_kernel(const __grid_constant__ AttentionCall call, const Rows dq,
                                        float* rows) {
  const std::int64_t row = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (row >= call.problem.heads_q * call.rows_q()) return;
  const std::int64_t h = row / call.rows_q();
  const std::int64_t at = row % call.rows_q();
  const std::int64_t b = call.packed() ? 0 : at / call.problem.length_q;
  const std::int64_t s = call.packed() ? at : at % call.problem.length_q;
  const std::byte* q_row = call.q.at(b, h, s);
  auto* dq_row = reinterpret_cast<float*>(dq.at(b, h, s));
  const auto size = static_cast<std::int64_t>(size_of(call.q.dtype));
  float sum = 0;
  for (std::int64_t d = threadIdx.x % 32; d < call.problem.dim_qk; d += 32) {
    sum = fmaf(load_element(q_row + d * size, call.q.dtype), dq_row[d], sum);
  }
  sum = warp_sum(sum);
  const auto logit = static_cast<float>(call.logit_scale.at(b, h));
  if (threadIdx.x % 32 == 0) rows[row] = sum / differentiable(logit);
  if (logit == differentiable(logit)) return;
  for (std::int64_t d = threadIdx.x % 32; d < call.problem.dim_qk; d += 32) dq_row[d] *= logit;
}

// A tensor whose unused rows are cleared: packed rows that no sequence owns, or keys past an entry's length.
struct Unused {
  Rows rows;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::int64_t capacity = 0;  // rows per head, or per head and entry
  bool of_queries = false;

  __device__ bool has(const AttentionCall& call, std::int64_t b, std::int64_t s) const {
    if (!call.packed()) return s >= call.sequence(b).length_k;
    return !(of_queries ? call.starts_q() : call.starts_k()).own(s);
  }
};

// A CTA takes clear_threads rows of a head: each thread checks one row, then all clear the unused ones.
constexpr int clear_threads = 64;

__global__ void __launch_bounds__(clear_threads)
    clear_unused_rows(const __grid_constant__ AttentionCall call, const Unused what) {
  __shared__ bool unused_smem[clear_threads];
  const std::int64_t row_groups = (what.capacity + clear_threads - 1) / clear_threads;
  const std::int64_t first = blockIdx.x % row_groups * clear_threads;
  const std::int64_t h = blockIdx.x / row_groups % what.heads;
  const std::int64_t b = blockIdx.x / row_groups / what.heads;
  const std::int64_t own = first + threadIdx.x;
  unused_smem[threadIdx.x] = own < what.capacity && what.has(call, b, own);
  __syncthreads();  // all rows were checked
  for (int r = 0; r < clear_threads; ++r) {
    if (!unused_smem[r]) continue;
    std::byte* row = what.rows.at(b, h, first + r);
    for (std::int64_t d = threadIdx.x; d < what.dim; d += clear_threads) {
      store_element(row + d * static_cast<std::int64_t>(size_of(what.rows.dtype)), what.rows.dtype, 0.0f);
    }
  }
}

__global__ void __launch_bounds__(clear_threads)
    clear_unused_lse(const __grid_constant__ AttentionCall call) {
  const std::int64_t index = std::int64_t{blockIdx.x} * clear_threads + threadIdx.x;
  const std::int64_t s = index % call.total_q;
  const std::int64_t h = index / call.total_q;
  if (h >= call.problem.heads_q || call.starts_q().own(s)) return;
  *reinterpret_cast<float*>(call.lse.at(0, h, s)) = minus_infinity;
}

void clear(const AttentionCall& call, const Rows& rows, std::int64_t heads, std::int64_t dim, bool of_queries,
           cudaStream_t stream) {
  if (!rows.wanted) return;
  const std::int64_t entries = call.packed() ? 1 : call.problem.batch;
  const std::int64_t capacity =
      call.packed() ? (of_queries ? call.total_q : call.total_k) : call.problem.length_k;
  launch<clear_unused_rows>({.name = "tilewise clear unused rows",
                             .blocks = entries * heads * ((capacity + clear_threads - 1) / clear_threads),
                             .threads = clear_threads,
                             .stream = stream},
                            call, Unused{rows, heads, dim, capacity, of_queries});
}

}  // namespace

void sink_gradient(const AttentionCall& call, const RowStates& states, cudaStream_t stream) {
  launch<sink_gradient_kernel>({.name = "tilewise sink gradient",
                                .blocks = call.problem.heads_q,
                                .threads = sum_threads,
                                .stream = stream},
                               call, states);
}

void logit_scale_rows(const AttentionCall& call, const Rows& dq, float* rows, cudaStream_t stream) {
  launch<logit_scale_rows_kernel>(
      {.name = "tilewise logit scale gradient, rows",
       .blocks = (call.problem.heads_q * call.rows_q() * 32 + sum_threads - 1) / sum_threads,
       .threads = sum_threads,
       .stream = stream},
      call, dq, rows);
}

void logit_scale_gradient(const AttentionCall& call, const float* rows, cudaStream_t stream) {
  launch<logit_scale_kernel>({.name = "tilewise logit scale gradient",
                              .blocks = call.problem.heads_q,
                              .threads = sum_threads,
                              .stream = stream},
                             call, rows);
}

void clear_unused_outputs(const AttentionCall& call, cudaStream_t stream) {
  if (!call.packed()) return;
  clear(call, call.o, call.problem.heads_q, call.problem.dim_v, true, stream);
  if (!call.lse.wanted) return;
  launch<clear_unused_lse>(
      {.name = "tilewise clear unused lse",
       .blocks = (call.problem.heads_q * call.total_q + clear_threads - 1) / clear_threads,
       .threads = clear_threads,
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
