#pragma once

#include "attention/call.h"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda::simt {

// What the rungs that keep scores in memory share: a pair's score and gradient, and the passes over rows. In
// those, `lanes` neighbouring threads have a row: one thread, or a warp. Each sum has one order.

/// e^x of a difference of scores.
__device__ __forceinline__ float exp_of(float x) { return exp2_approx(x * log2e); }

/// This thread among all of a launch.
__device__ __forceinline__ std::int64_t thread_index() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

/// Query i of entry b and head h, with the keys that band and lengths leave to it.
struct QueryRow {
  std::int64_t b, h, i;
  Sequence sequence;
  KeyRange keys;

  __device__ QueryRow(const AttentionCall& call, std::int64_t b, std::int64_t h, std::int64_t i)
      : b(b), h(h), i(i), sequence(call.sequence(b)), keys(call.keys_of(sequence, i)) {}
  /// Number `row` of [B, Hq, Sq].
  __device__ QueryRow(const AttentionCall& call, std::int64_t row)
      : QueryRow(call, row / call.problem.length_q / call.problem.heads_q,
                 row / call.problem.length_q % call.problem.heads_q, row % call.problem.length_q) {}

  __device__ bool sees(std::int64_t j) const { return j >= keys.first && j < keys.last; }
  __device__ std::int64_t index(const AttentionCall& call) const {
    return (b * call.problem.heads_q + h) * call.problem.length_q + i;
  }
};

/// The score of key j; −inf where it is hidden.
__device__ __forceinline__ float pair_score(const AttentionCall& call, const ScoreRules& rules,
                                            const QueryRow& row, std::int64_t j, float product) {
  float tangent;
  return row.sees(j) ? score_of(call, rules, row.sequence, row.b, row.h, row.i, j, product, tangent)
                     : minus_infinity;
}

/// What backward knows of a row before it meets a key.
struct RowGradient {
  float lse;
  float shift;  // d_lse − Σ_d d_o·o

  __device__ RowGradient(const AttentionCall& call, const QueryRow& row, const float* shifts_gmem)
      : lse(*reinterpret_cast<const float*>(call.lse.at(row.b, row.h, row.i))),
        shift(shifts_gmem[row.index(call)]) {}
};

/// What backward keeps of a pair.
struct StoredPair {
  float weight;    // after dropout
  float dscore;    // of the score, and so of what the mask added
  float dproduct;  // of scale·q·k
};

/// From the products q·k and d_o·v of a pair. A hidden one gives zeros.
__device__ __forceinline__ StoredPair stored_pair(const AttentionCall& call, const ScoreRules& rules,
                                                  const QueryRow& row, const RowGradient& gradient,
                                                  std::int64_t j, float product, float dweight) {
  if (!row.sees(j) || gradient.lse == minus_infinity) return {};
  float tangent = 0;  // stays so without softcap
  const float score = score_of(call, rules, row.sequence, row.b, row.h, row.i, j, product, tangent);
  if (score == minus_infinity) return {};
  const float p = exp_of(score - gradient.lse);
  const float kept = call.problem.features.dropout ? dropout_factor(call, row.b, row.h, row.i, j) : 1.0f;
  const float dscore = p * fmaf(dweight, kept, gradient.shift);
  return {p * kept, dscore, dscore * (1.0f - tangent * tangent)};
}

template <int lanes>
__device__ __forceinline__ float maximum_over(float x) {
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
  return x;
}
template <int lanes>
__device__ __forceinline__ float sum_over(float x) {
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

/// Scores to weights, dropout included, in place; writes lse. Every lane keeps to its own keys.
template <int lanes>
__global__ void softmax_rows(const __grid_constant__ AttentionCall call,
                             float* scores_gmem) {  // [B, Hq, Sq, Sk]
  const AttentionProblem& problem = call.problem;
  const std::int64_t index = thread_index() / lanes;
  if (index >= problem.heads_q * call.rows_q()) return;  // all lanes of a row together
  const int lane = threadIdx.x % lanes;
  const QueryRow row(call, index);
  float* row_gmem = scores_gmem + index * problem.length_k;

  const float sink =
      problem.features.sinks ? static_cast<float>(call.sinks.at(row.b, row.h)) : minus_infinity;
  // From the lowest finite number, so that no difference is NaN in a row that sees nothing.
  float maximum = fmaxf(sink, -3.402823466e38f);
  for (std::int64_t j = lane; j < problem.length_k; j += lanes) maximum = fmaxf(maximum, row_gmem[j]);
  maximum = maximum_over<lanes>(maximum);
  float sum = 0;
  for (std::int64_t j = lane; j < problem.length_k; j += lanes) sum += exp_of(row_gmem[j] - maximum);
  sum = sum_over<lanes>(sum) + exp_of(sink - maximum);

  const bool empty = sum == 0;
  const float inverse = empty ? 0.0f : 1.0f / sum;
  for (std::int64_t j = lane; j < problem.length_k; j += lanes) {
    const float p = exp_of(row_gmem[j] - maximum) * inverse;
    const bool drawn = problem.features.dropout && row.sees(j);
    row_gmem[j] = drawn ? p * dropout_factor(call, row.b, row.h, row.i, j) : p;
  }
  if (lane == 0 && call.lse.wanted) {
    const float lse = empty ? minus_infinity : maximum + logf(sum);
    *reinterpret_cast<float*>(call.lse.at(row.b, row.h, row.i)) = lse;
  }
}

/// What all score gradients of a row have in common: d_lse − Σ_d d_o·o.
template <typename T, int lanes>
__global__ void shift_rows(const __grid_constant__ AttentionCall call, float* shifts_gmem) {  // [B, Hq, Sq]
  const std::int64_t index = thread_index() / lanes;
  if (index >= call.problem.heads_q * call.rows_q()) return;
  const int lane = threadIdx.x % lanes;
  const QueryRow row(call, index);
  const T* o_gmem = reinterpret_cast<const T*>(call.o.at(row.b, row.h, row.i));      // [Dv]
  const T* d_o_gmem = reinterpret_cast<const T*>(call.d_o.at(row.b, row.h, row.i));  // [Dv]
  float delta = 0;
  for (int d = lane; d < call.problem.dim_v; d += lanes) {
    delta = fmaf(widen(d_o_gmem[d]), widen(o_gmem[d]), delta);
  }
  delta = sum_over<lanes>(delta);
  if (lane != 0) return;
  const float d_lse =
      call.d_lse.wanted ? *reinterpret_cast<const float*>(call.d_lse.at(row.b, row.h, row.i)) : 0.0f;
  shifts_gmem[index] = d_lse - delta;
}

/// dsinks: the weight of the sink times the row's shift, over all rows of a head.
template <int lanes>
__global__ void sum_sinks(const __grid_constant__ AttentionCall call,
                          const float* shifts_gmem) {  // [B, Hq, Sq]
  const AttentionProblem& problem = call.problem;
  const std::int64_t h = thread_index() / lanes;
  if (h >= problem.heads_q) return;
  const int lane = threadIdx.x % lanes;
  float sum = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const float sink = static_cast<float>(call.sinks.at(b, h));
    for (std::int64_t i = lane; i < problem.length_q; i += lanes) {
      const float lse = *reinterpret_cast<const float*>(call.lse.at(b, h, i));
      if (lse == minus_infinity) continue;  // the row saw nothing, not even its sink
      const float shift = shifts_gmem[(b * problem.heads_q + h) * problem.length_q + i];
      sum = fmaf(exp_of(sink - lse), shift, sum);
    }
  }
  sum = sum_over<lanes>(sum);
  if (lane == 0) reinterpret_cast<float*>(call.dsinks)[h * call.dsinks_stride] = sum;
}

/// dmask: each element is the sum of all score gradients that it was added to. With several lanes these share
/// the keys, so that they read side by side where the mask is broadcast along them.
template <int lanes>
__global__ void sum_mask(const __grid_constant__ AttentionCall call,
                         const float* dscores_gmem) {  // [B, Hq, Sq, Sk]
  const AttentionProblem& problem = call.problem;
  const MaskView& dmask = call.dmask;
  const std::int64_t whole[4] = {problem.batch, problem.heads_q, problem.length_q, problem.length_k};
  std::int64_t rest = thread_index() / lanes;
  const int lane = threadIdx.x % lanes;
  std::int64_t index[4], first[4], last[4];
#pragma unroll
  for (int dim = 3; dim >= 0; --dim) {
    const bool summed = dmask.extent[dim] == 1;
    index[dim] = rest % dmask.extent[dim];
    rest /= dmask.extent[dim];
    first[dim] = summed ? 0 : index[dim];
    last[dim] = summed ? whole[dim] : index[dim] + 1;
  }
  if (rest > 0) return;  // past the last element
  float sum = 0;
  for (std::int64_t b = first[0]; b < last[0]; ++b) {
    for (std::int64_t h = first[1]; h < last[1]; ++h) {
      for (std::int64_t i = first[2]; i < last[2]; ++i) {
        const float* row_gmem = dscores_gmem + ((b * whole[1] + h) * whole[2] + i) * whole[3];
        float row_sum = 0;
        for (std::int64_t j = first[3] + lane; j < last[3]; j += lanes) row_sum += row_gmem[j];
        sum += row_sum;
      }
    }
  }
  sum = sum_over<lanes>(sum);
  if (lane == 0) store_element(dmask.at(index[0], index[1], index[2], index[3]), dmask.dtype, sum);
}

}  // namespace tilewise::cuda::simt
