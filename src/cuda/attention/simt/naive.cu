#include "cuda/attention/simt/dense.h"
#include "cuda/attention/simt/dense_rows.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda::simt {
namespace {

// Attention as its formula is written. S, the softmax and O are passes over matrices in memory, with one
// thread for each element of a result. Threads share nothing but what the caches happen to hold.

constexpr int threads = 256;

// One row of a tensor: [D] or [Dv].
template <typename T>
__device__ __forceinline__ T* row_of(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t s) {
  return reinterpret_cast<T*>(rows.at(b, h, s));
}

// A sum of products in runs of 16 terms, summed in runs of 256: the error of a running sum grows with its
// length.
class PiecewiseSum {
 public:
  __device__ void add(float a, float b) {
    run_ = fmaf(a, b, run_);
    if (++terms_ % 16 != 0) return;
    runs_ += run_;
    run_ = 0;
    if (terms_ % 256 != 0) return;
    sum_ += runs_;
    runs_ = 0;
  }
  __device__ float value() const { return sum_ + (runs_ + run_); }

 private:
  float sum_ = 0;
  float runs_ = 0;
  float run_ = 0;
  int terms_ = 0;
};

template <typename T>
__device__ __forceinline__ float dot(const T* a_gmem, const T* b_gmem, std::int64_t dim) {
  PiecewiseSum sum;
  for (std::int64_t d = 0; d < dim; ++d) sum.add(widen(a_gmem[d]), widen(b_gmem[d]));
  return sum.value();
}

// S: one thread per score, s = score(q_i·k_j).
template <typename T>
__global__ void __launch_bounds__(threads) naive_scores(const __grid_constant__ AttentionCall call,
                                                        float* s_gmem) {  // [B, Hq, Sq, Sk]
  const std::int64_t at = thread_index();
  if (at >= ForwardScratch::matrix_size(call)) return;
  const std::int64_t j = at % call.problem.length_k;
  const QueryRow row(call, at / call.problem.length_k);
  float qk = 0;
  if (row.sees(j)) {
    const T* q_gmem = row_of<T>(call.q, row.b, row.h, row.i);
    const T* k_gmem = row_of<T>(call.k, row.b, call.key_head(row.h), j);
    qk = dot(q_gmem, k_gmem, call.problem.dim_qk);
  }
  s_gmem[at] = pair_score(call, ScoreRule(call, row.b, row.h), row, j, qk);
}

// One thread per pair: stores q·k and dO·v in the place of P and dS.
template <typename T>
__global__ void __launch_bounds__(threads)
    naive_products(const __grid_constant__ AttentionCall call, const BackwardScratch scratch) {
  const std::int64_t at = thread_index();
  if (at >= ForwardScratch::matrix_size(call)) return;
  const std::int64_t j = at % call.problem.length_k;
  const QueryRow row(call, at / call.problem.length_k);
  float qk = 0;
  float dp = 0;
  if (row.sees(j)) {
    const std::int64_t h_kv = call.key_head(row.h);
    qk = dot(row_of<T>(call.q, row.b, row.h, row.i), row_of<T>(call.k, row.b, h_kv, j), call.problem.dim_qk);
    dp = dot(row_of<T>(call.d_o, row.b, row.h, row.i), row_of<T>(call.v, row.b, h_kv, j), call.problem.dim_v);
  }
  scratch.p[at] = qk;
  scratch.ds[at] = dp;
}

// O or dQ: one thread per element, out[i, d] = factor · Σ_j matrix[i, j]·keys[j, d].
template <typename T>
__global__ void __launch_bounds__(threads) naive_query_sums(const __grid_constant__ AttentionCall call,
                                                            const float* matrix_gmem,  // [B, Hq, Sq, Sk]
                                                            const Rows keys,           // [B, Hkv, Sk, dim]
                                                            const Rows out,            // [B, Hq, Sq, dim]
                                                            const std::int64_t dim, const float factor) {
  const std::int64_t at = thread_index();
  if (at >= call.problem.heads_q * call.rows_q() * dim) return;
  const std::int64_t d = at % dim;
  const QueryRow row(call, at / dim);
  const float* matrix_row_gmem = matrix_gmem + at / dim * call.problem.length_k;
  const T* column_gmem = row_of<T>(keys, row.b, call.key_head(row.h), 0) + d;
  PiecewiseSum sum;
  for (std::int64_t j = row.keys.first; j < row.keys.last; ++j) {
    sum.add(matrix_row_gmem[j], widen(column_gmem[j * keys.stride_s]));
  }
  row_of<T>(out, row.b, row.h, row.i)[d] = narrow<T>(factor * sum.value());
}

// dK or dV: one thread per element, out[j, d] = factor · Σ_i matrix[i, j]·queries[i, d], also summed over the
// query heads that share the key. Columns of keys that no query sees are zero.
template <typename T>
__global__ void __launch_bounds__(threads) naive_key_sums(const __grid_constant__ AttentionCall call,
                                                          const float* matrix_gmem,  // [B, Hq, Sq, Sk]
                                                          const Rows queries,        // [B, Hq, Sq, dim]
                                                          const Rows out,            // [B, Hkv, Sk, dim]
                                                          const std::int64_t dim, const float factor) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t at = thread_index();
  if (at >= problem.heads_kv * call.rows_k() * dim) return;
  const std::int64_t d = at % dim;
  const std::int64_t j = at / dim % problem.length_k;
  const std::int64_t h_kv = at / dim / problem.length_k % problem.heads_kv;
  const std::int64_t b = at / dim / problem.length_k / problem.heads_kv;
  PiecewiseSum sum;
  for (std::int64_t h = h_kv * call.group(); h < (h_kv + 1) * call.group(); ++h) {
    const float* matrix_column_gmem =
        matrix_gmem + (b * problem.heads_q + h) * problem.length_q * problem.length_k + j;
    const T* column_gmem = row_of<T>(queries, b, h, 0) + d;
    for (std::int64_t i = 0; i < problem.length_q; ++i) {
      sum.add(matrix_column_gmem[i * problem.length_k], widen(column_gmem[i * queries.stride_s]));
    }
  }
  row_of<T>(out, b, h_kv, j)[d] = narrow<T>(factor * sum.value());
}

// A launch with one thread for each of `count` elements.
Launch thread_each(const char* name, std::int64_t count, const Context& context) {
  return {.name = name,
          .blocks = (count + threads - 1) / threads,
          .threads = threads,
          .stream = static_cast<cudaStream_t>(context.stream)};
}

template <typename T>
void forward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t rows = problem.heads_q * call.rows_q();
  Arena arena(context.workspace.data);
  const ForwardScratch scratch(arena, call);
  launch<naive_scores<T>>(thread_each("tilewise naive S", rows * problem.length_k, context), call, scratch.s);
  launch<softmax_rows<1>>(thread_each("tilewise naive softmax", rows, context), call, scratch.s);
  launch<naive_query_sums<T>>(thread_each("tilewise naive output", rows * problem.dim_v, context), call,
                              scratch.s, call.v, call.o, problem.dim_v, 1.0f);
}

template <typename T>
void backward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t rows_q = problem.heads_q * call.rows_q();
  const std::int64_t rows_k = problem.heads_kv * call.rows_k();
  const auto scale = static_cast<float>(call.scale);
  Arena arena(context.workspace.data);
  const BackwardScratch scratch(arena, call);
  launch<naive_products<T>>(thread_each("tilewise naive products", rows_q * problem.length_k, context), call,
                            scratch);
  // The only pass with a warp per row: a single thread would take minutes for the longest rows.
  launch<differentiate_rows<32>>(thread_each("tilewise naive dS", rows_q * 32, context), call,
                                 all_rows(call, scratch));
  if (call.dq.wanted) {
    launch<naive_query_sums<T>>(thread_each("tilewise naive dq", rows_q * problem.dim_qk, context), call,
                                scratch.dqk, call.k, call.dq, problem.dim_qk, scale);
  }
  if (call.dk.wanted) {
    launch<naive_key_sums<T>>(thread_each("tilewise naive dk", rows_k * problem.dim_qk, context), call,
                              scratch.dqk, call.q, call.dk, problem.dim_qk, scale);
  }
  if (call.dv.wanted) {
    launch<naive_key_sums<T>>(thread_each("tilewise naive dv", rows_k * problem.dim_v, context), call,
                              scratch.p, call.d_o, call.dv, problem.dim_v, 1.0f);
  }
  if (problem.features.mask_gradient) {
    const std::int64_t(&extent)[4] = call.dmask.extent;
    const std::int64_t elements = extent[0] * extent[1] * extent[2] * extent[3];
    launch<sum_mask>(thread_each("tilewise naive dmask", elements, context), call, scratch);
  }
  if (call.dsinks != nullptr) {
    launch<sum_sinks<1>>(thread_each("tilewise naive dsinks", problem.heads_q, context), call,
                         scratch.sink_terms);
  }
}

}  // namespace

void naive_forward(const AttentionCall& call, const Context& context) {
  with_type(call.problem.dtype, [&]<typename T>() { forward<T>(call, context); });
}

void naive_backward(const AttentionCall& call, const Context& context) {
  with_type(call.problem.dtype, [&]<typename T>() { backward<T>(call, context); });
}

}  // namespace tilewise::cuda::simt
