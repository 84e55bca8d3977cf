#pragma once

#include "attention/call.h"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/dense.h"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::simt {

// What the rungs that keep scores in memory share: a pair's score and gradient, and the passes over rows. In
// those, `lanes` neighbouring threads have a row: one thread, or a warp. Each sum has one order.

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
__device__ __forceinline__ float pair_score(const AttentionCall& call, const ScoreRule& rules,
                                            const QueryRow& row, std::int64_t j, float product) {
  float tangent;
  return row.sees(j) ? score_of(call, rules, row.sequence, row.b, row.h, row.i, j, product, tangent)
                     : minus_infinity;
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

/// Neighbouring rows of [B, Hq, Sq] on their way through backward. Their matrices are of `keys` alone, and of
/// `pitch` elements a row; what is written may be the memory of what is read.
template <typename T>
struct PairRows {
  std::int64_t first, count;  ///< rows
  KeyRange keys;
  std::int64_t pitch;
  const float* products;  ///< q·k
  const float* dweights;  ///< d_o·v
  T* weights;             ///< after dropout
  T* dproducts;           ///< gradients of scale·q·k
  T* weights_rest;        ///< what rounding to T took from either; null where that is nothing
  T* dproducts_rest;
  float* dscores;     ///< those of scores, where they are others and wanted; else null
  float* sink_parts;  ///< of all rows
  float* row_sums;    ///< of all rows
};

inline PairRows<float> all_rows(const AttentionCall& call, const BackwardScratch& scratch) {
  const AttentionProblem& problem = call.problem;
  return {.first = 0,
          .count = problem.heads_q * call.rows_q(),
          .keys = {0, problem.length_k},
          .pitch = problem.length_k,
          .products = scratch.weights,
          .dweights = scratch.dscores,
          .weights = scratch.weights,
          .dproducts = scratch.dproducts,
          .weights_rest = nullptr,
          .dproducts_rest = nullptr,
          .dscores = scratch.dscores == scratch.dproducts ? nullptr : scratch.dscores,
          .sink_parts = scratch.sink_parts,
          .row_sums = scratch.row_sums};
}

/// The products q·k and d_o·v of a row to weights and gradients; and what the row gives to dsinks and to a
/// mask with one element a row.
template <int lanes, typename T = float>
__global__ void differentiate_rows(const __grid_constant__ AttentionCall call,
                                   const __grid_constant__ PairRows<T> rows) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t own = thread_index() / lanes;
  if (own >= rows.count) return;  // all lanes of a row together
  const int lane = threadIdx.x % lanes;
  const std::int64_t index = rows.first + own;
  const QueryRow row(call, index);
  const ScoreRule rules(call, row.b, row.h);
  const std::int64_t begin = own * rows.pitch - rows.keys.first;  // where key 0 would be
  const float* products_gmem = rows.products + begin;
  const float* dweights_gmem = rows.dweights + begin;
  const auto dropout = [&](std::int64_t j) {
    return problem.features.dropout ? dropout_factor(call, row.b, row.h, row.i, j) : 1.0f;
  };
  // Rounded before it is used, so that it is one number here and there.
  const auto dweight = [&](std::int64_t j, float kept) { return __fmul_rn(dweights_gmem[j], kept); };

  const double sink = problem.features.sinks ? call.sinks.at(row.b, row.h) : -__builtin_huge_val();
  float top = fmaxf(static_cast<float>(sink), lowest);
  for (std::int64_t j = rows.keys.first + lane; j < rows.keys.last; j += lanes) {
    top = fmaxf(top, pair_score(call, rules, row, j, products_gmem[j]));
  }
  top = maximum_over<lanes>(top);
  double sum = 0;
  double weighted = 0;
  for (std::int64_t j = rows.keys.first + lane; j < rows.keys.last; j += lanes) {
    const float weight = expf(pair_score(call, rules, row, j, products_gmem[j]) - top);
    sum += static_cast<double>(weight);
    if (weight != 0) weighted += static_cast<double>(weight) * static_cast<double>(dweight(j, dropout(j)));
  }
  sum = sum_over<lanes>(sum);
  weighted = sum_over<lanes>(weighted);

  const double sink_weight = exp(sink - static_cast<double>(top));
  const double total = sum + sink_weight;
  const bool unseen = total == 0;
  const double delta = unseen ? 0.0 : weighted / total;
  const double d_lse =
      call.d_lse.wanted
          ? static_cast<double>(*reinterpret_cast<const float*>(call.d_lse.at(row.b, row.h, row.i)))
          : 0.0;
  const auto inverse = static_cast<float>(unseen ? 0.0 : 1 / total);
  const auto shift = static_cast<float>(d_lse - delta);
  for (std::int64_t j = rows.keys.first + lane; j < rows.keys.last; j += lanes) {
    float tangent = 0;  // stays so without softcap
    float score = minus_infinity;
    if (!unseen && row.sees(j)) {
      score = score_of(call, rules, row.sequence, row.b, row.h, row.i, j, products_gmem[j], tangent);
    }
    const bool hidden = score == minus_infinity;
    const float weight = hidden ? 0.0f : expf(score - top) * inverse;
    const float kept = hidden ? 0.0f : dropout(j);
    const float dscore = hidden ? 0.0f : weight * (dweight(j, kept) + shift);
    const auto store = [&](float value, T* high_gmem, T* rest_gmem) {
      const T high = narrow<T>(value);
      high_gmem[begin + j] = high;
      if (rest_gmem != nullptr) rest_gmem[begin + j] = narrow<T>(value - widen(high));
    };
    store(weight * kept, rows.weights, rows.weights_rest);
    if (rows.dscores != nullptr) rows.dscores[begin + j] = dscore;
    store(dscore * (1.0f - tangent * tangent), rows.dproducts, rows.dproducts_rest);
  }
  if (lane != 0) return;
  rows.sink_parts[index] = unseen ? 0.0f : static_cast<float>(sink_weight / total * (d_lse - delta));
  rows.row_sums[index] = sum == 0 ? 0.0f : static_cast<float>((sum * d_lse + sink_weight * delta) / total);
}

/// dsinks: what the rows of a head give.
template <int lanes>
__global__ void sum_sinks(const __grid_constant__ AttentionCall call,
                          const float* parts_gmem) {  // [B, Hq, Sq]
  const AttentionProblem& problem = call.problem;
  const std::int64_t h = thread_index() / lanes;
  if (h >= problem.heads_q) return;
  const int lane = threadIdx.x % lanes;
  double sum = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const float* head_gmem = parts_gmem + (b * problem.heads_q + h) * problem.length_q;  // [Sq]
    for (std::int64_t i = lane; i < problem.length_q; i += lanes) sum += static_cast<double>(head_gmem[i]);
  }
  sum = sum_over<lanes>(sum);
  if (lane == 0) reinterpret_cast<float*>(call.dsinks)[h * call.dsinks_stride] = static_cast<float>(sum);
}

/// dmask: each element is the sum of all score gradients that it was added to.
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
  if (rest > 0) return;  // past the last element
  const bool sums_rows = dmask.extent[3] == 1;
  double sum = 0;
  for (std::int64_t b = first[0]; b < last[0]; ++b) {
    for (std::int64_t h = first[1]; h < last[1]; ++h) {
      for (std::int64_t i = first[2]; i < last[2]; ++i) {
        const std::int64_t row = (b * whole[1] + h) * whole[2] + i;
        sum += static_cast<double>(sums_rows ? scratch.row_sums[row]
                                             : scratch.dscores[row * whole[3] + index[3]]);
      }
    }
  }
  store_element(dmask.at(index[0], index[1], index[2], index[3]), dmask.dtype, static_cast<float>(sum));
}

}  // namespace tilewise::cuda::simt
