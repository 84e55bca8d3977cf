#pragma once

#include "attention/call.h"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/dense.h"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::simt {

// The parts that the kernels with S in memory share (naive, tiled and wide): the score of a pair, and the
// passes over rows. In a pass, `lanes` neighbouring threads have a row: one thread, or a warp. Each sum has
// one order.

/// The thread's index in the launch.
__device__ __forceinline__ std::int64_t thread_index() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

/// Query i of entry b and head h, with the keys that the band and the lengths leave to it.
struct QueryRow {
  std::int64_t b, h, i;
  Sequence sequence;
  KeyRange keys;

  __device__ QueryRow(const AttentionCall& call, std::int64_t b, std::int64_t h, std::int64_t i)
      : b(b), h(h), i(i), sequence(call.sequence(b)), keys(call.keys_of(sequence, i)) {}
  /// Row number `row` of [B, Hq, Sq].
  __device__ QueryRow(const AttentionCall& call, std::int64_t row)
      : QueryRow(call, row / call.problem.length_q / call.problem.heads_q,
                 row / call.problem.length_q % call.problem.heads_q, row % call.problem.length_q) {}

  __device__ bool sees(std::int64_t j) const { return j >= keys.first && j < keys.last; }
  __device__ std::int64_t index(const AttentionCall& call) const {
    return (b * call.problem.heads_q + h) * call.problem.length_q + i;
  }
};

/// The score of key j; −inf where it is hidden.
__device__ __forceinline__ float pair_score(const AttentionCall& call, const ScoreRule& rules,
                                            const QueryRow& row, std::int64_t j, float product) {
  float tangent;
  return row.sees(j) ? score_of(call, rules, row.sequence, row.b, row.h, row.i, j, product, tangent)
                     : minus_infinity;
}

/// Replaces S by P, dropout included, in place, and writes LSE. Each lane reads and writes its own keys only.
template <int lanes>
__global__ void softmax_rows(const __grid_constant__ AttentionCall call,
                             float* scores_gmem) {  // [B, Hq, Sq, Sk]
  const AttentionProblem& problem = call.problem;
  const std::int64_t index = thread_index() / lanes;
  if (index >= problem.heads_q * call.rows_q()) return;  // the same for all lanes of a row
  const int lane = threadIdx.x % lanes;
  const QueryRow row(call, index);
  float* row_gmem = scores_gmem + index * problem.length_k;

  const float sink =
      problem.features.sinks ? static_cast<float>(call.sinks.at(row.b, row.h)) : minus_infinity;
  // Starts at the lowest finite number, so that no difference is NaN in an empty row.
  float maximum = fmaxf(sink, lowest);
  for (std::int64_t j = lane; j < problem.length_k; j += lanes) maximum = fmaxf(maximum, row_gmem[j]);
  maximum = maximum_over<lanes>(maximum);
  double sum = 0;
  for (std::int64_t j = lane; j < problem.length_k; j += lanes) {
    sum += static_cast<double>(expf(row_gmem[j] - maximum));
  }
  sum = sum_over<lanes>(sum) + static_cast<double>(expf(sink - maximum));

  const bool empty = sum == 0;
  const auto inverse = static_cast<float>(empty ? 0.0 : 1 / sum);
  for (std::int64_t j = lane; j < problem.length_k; j += lanes) {
    const float p = expf(row_gmem[j] - maximum) * inverse;
    const bool drawn = problem.features.dropout && row.sees(j);
    row_gmem[j] = drawn ? p * dropout_factor(call, row.b, row.h, row.i, j) : p;
  }
  if (lane == 0 && call.lse.wanted) {
    const float lse = empty ? minus_infinity : maximum + logf(static_cast<float>(sum));
    *reinterpret_cast<float*>(call.lse.at(row.b, row.h, row.i)) = lse;
  }
}

/// The inputs and outputs of differentiate_rows(), for neighbouring rows of [B, Hq, Sq]. Matrices have `keys`
/// as columns and a pitch of `pitch` elements. Outputs may overwrite inputs.
template <typename T>
struct PairRows {
  /// CTAs that an SM must have room for: a limit of 64 registers per thread.
  static constexpr int least_ctas = 4;
  std::int64_t first, count;  ///< rows
  KeyRange keys;
  std::int64_t pitch;
  const float* qk;  ///< q·k
  const float* dp;  ///< dO·v
  T* p;             ///< after dropout
  T* dqk;           ///< the gradient of scale·q·k
  T* p_low;         ///< what rounding to T lost of P and dqk; null where T is f32
  T* dqk_low;
  float* ds;          ///< dS, where it differs from dqk and is wanted; else null
  float* sink_terms;  ///< of all rows
  float* row_sums;    ///< of all rows

  /// The number of row `own` of these in [B, Hq, Sq], and its row in the matrices.
  __device__ std::int64_t index(std::int64_t own) const { return first + own; }
  __device__ std::int64_t line(std::int64_t own) const { return own; }
  /// The keys of row `own` that have products, and for which outputs are wanted. It sees no others.
  __device__ KeyRange keys_of(std::int64_t) const { return keys; }
  /// Whether row `own` has key j of these, and whether it sees it as far as a block mask is concerned.
  __device__ bool has(std::int64_t, std::int64_t) const { return true; }
  __device__ bool shows(const AttentionCall&, std::int64_t, std::int64_t) const { return true; }
};

inline PairRows<float> all_rows(const AttentionCall& call, const BackwardScratch& scratch) {
  const AttentionProblem& problem = call.problem;
  return {.first = 0,
          .count = problem.heads_q * call.rows_q(),
          .keys = {0, problem.length_k},
          .pitch = problem.length_k,
          .qk = scratch.p,
          .dp = scratch.ds,
          .p = scratch.p,
          .dqk = scratch.dqk,
          .p_low = nullptr,
          .dqk_low = nullptr,
          .ds = scratch.ds == scratch.dqk ? nullptr : scratch.ds,
          .sink_terms = scratch.sink_terms,
          .row_sums = scratch.row_sums};
}

/// Computes P and the gradients of a row from its products q·k and dO·v. Also computes the row's term of
/// dsinks, and its sum of dS for a mask with one element per row.
template <int lanes, typename T = float, typename Rows = PairRows<T>>
__global__ void __launch_bounds__(256, Rows::least_ctas)
    differentiate_rows(const __grid_constant__ AttentionCall call, const __grid_constant__ Rows rows) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t own = thread_index() / lanes;
  if (own >= rows.count) return;  // the same for all lanes of a row
  const int lane = threadIdx.x % lanes;
  const std::int64_t index = rows.index(own);
  const QueryRow row(call, index);
  const ScoreRule rules(call, row.b, row.h);
  const std::int64_t begin =
      rows.line(own) * rows.pitch - rows.keys.first;  // the index that key 0 would have
  const KeyRange keys = rows.keys_of(own);
  const float* qk_gmem = rows.qk + begin;
  const float* dp_gmem = rows.dp + begin;
  const auto dropout = [&](std::int64_t j) {
    return problem.features.dropout ? dropout_factor(call, row.b, row.h, row.i, j) : 1.0f;
  };
  const auto score_at = [&](std::int64_t j) {
    return rows.shows(call, own, j) ? pair_score(call, rules, row, j, qk_gmem[j]) : minus_infinity;
  };
  // Rounded before it is used, so that both loops have the same number.
  const auto dropped_dp = [&](std::int64_t j, float kept) { return __fmul_rn(dp_gmem[j], kept); };

  const double sink = problem.features.sinks ? call.sinks.at(row.b, row.h) : -__builtin_huge_val();
  float maximum = fmaxf(static_cast<float>(sink), lowest);
  for (std::int64_t j = keys.first + lane; j < keys.last; j += lanes) {
    if (rows.has(own, j)) maximum = fmaxf(maximum, score_at(j));
  }
  maximum = maximum_over<lanes>(maximum);
  double sum = 0;
  double sum_dp = 0;
  for (std::int64_t j = keys.first + lane; j < keys.last; j += lanes) {
    if (!rows.has(own, j)) continue;
    const float p = expf(score_at(j) - maximum);
    sum += static_cast<double>(p);
    if (p != 0) sum_dp += static_cast<double>(p) * static_cast<double>(dropped_dp(j, dropout(j)));
  }
  sum = sum_over<lanes>(sum);
  sum_dp = sum_over<lanes>(sum_dp);

  const double sink_weight = exp(sink - static_cast<double>(maximum));
  const double total = sum + sink_weight;
  const bool empty = total == 0;
  const double delta = empty ? 0.0 : sum_dp / total;
  const double d_lse =
      call.d_lse.wanted
          ? static_cast<double>(*reinterpret_cast<const float*>(call.d_lse.at(row.b, row.h, row.i)))
          : 0.0;
  const auto inverse = static_cast<float>(empty ? 0.0 : 1 / total);
  const auto shift = static_cast<float>(d_lse - delta);
  for (std::int64_t j = keys.first + lane; j < keys.last; j += lanes) {
    if (!rows.has(own, j)) continue;
    float tangent = 0;  // remains 0 without softcap
    float score = minus_infinity;
    if (!empty && row.sees(j) && rows.shows(call, own, j)) {
      score = score_of(call, rules, row.sequence, row.b, row.h, row.i, j, qk_gmem[j], tangent);
    }
    const bool hidden = score == minus_infinity;
    const float p = hidden ? 0.0f : expf(score - maximum) * inverse;
    const float kept = hidden ? 0.0f : dropout(j);
    const float ds = hidden ? 0.0f : p * (dropped_dp(j, kept) + shift);
    const auto store = [&](float value, T* high_gmem, T* low_gmem) {
      const T high = narrow<T>(value);
      high_gmem[begin + j] = high;
      if (low_gmem != nullptr) low_gmem[begin + j] = narrow<T>(value - widen(high));
    };
    store(p * kept, rows.p, rows.p_low);
    if (rows.ds != nullptr) rows.ds[begin + j] = ds;
    store(ds * (1.0f - tangent * tangent), rows.dqk, rows.dqk_low);
  }
  if (lane != 0) return;
  rows.sink_terms[index] = empty ? 0.0f : static_cast<float>(sink_weight / total * (d_lse - delta));
  rows.row_sums[index] = sum == 0 ? 0.0f : static_cast<float>((sum * d_lse + sink_weight * delta) / total);
}

/// dsinks: the sum of the terms of a head's rows.
template <int lanes>
__global__ void sum_sinks(const __grid_constant__ AttentionCall call,
                          const float* terms_gmem) {  // [B, Hq, Sq]
  const AttentionProblem& problem = call.problem;
  const std::int64_t h = thread_index() / lanes;
  if (h >= problem.heads_q) return;
  const int lane = threadIdx.x % lanes;
  double sum = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const float* head_gmem = terms_gmem + (b * problem.heads_q + h) * problem.length_q;  // [Sq]
    for (std::int64_t i = lane; i < problem.length_q; i += lanes) sum += static_cast<double>(head_gmem[i]);
  }
  sum = sum_over<lanes>(sum);
  if (lane == 0) reinterpret_cast<float*>(call.dsinks)[h * call.dsinks_stride] = static_cast<float>(sum);
}

/// dmask: each element is the sum of dS over all pairs that it was added to.
__global__ inline void sum_mask(const __grid_constant__ AttentionCall call, const BackwardScratch scratch) {
  const AttentionProblem& problem = call.problem;
  const MaskView& dmask = call.dmask;
  const std::int64_t whole[4] = {problem.batch, problem.heads_q, problem.length_q, problem.length_k};
  std::int64_t rest = thread_index();
  std::int64_t index[4], first[3], last[3];
#pragma unroll
  for (int dim = 3; dim >= 0; --dim) {
    index[dim] = rest % dmask.extent[dim];
    rest /= dmask.extent[dim];
    if (dim == 3) continue;
    const bool summed = dmask.extent[dim] == 1;
    first[dim] = summed ? 0 : index[dim];
    last[dim] = summed ? whole[dim] : index[dim] + 1;
  }
  if (rest > 0) return;  // the thread is past the last element
  const bool sums_rows = dmask.extent[3] == 1;
  double sum = 0;
  for (std::int64_t b = first[0]; b < last[0]; ++b) {
    for (std::int64_t h = first[1]; h < last[1]; ++h) {
      for (std::int64_t i = first[2]; i < last[2]; ++i) {
        const std::int64_t row = (b * whole[1] + h) * whole[2] + i;
        sum += static_cast<double>(sums_rows ? scratch.row_sums[row] : scratch.ds[row * whole[3] + index[3]]);
      }
    }
  }
  store_element(dmask.at(index[0], index[1], index[2], index[3]), dmask.dtype, static_cast<float>(sum));
}

}  // namespace tilewise::cuda::simt
