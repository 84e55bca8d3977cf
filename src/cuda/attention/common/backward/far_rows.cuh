#pragma once

#include "cuda/attention/common/backward/batch_rows.cuh"
#include "cuda/attention/common/key_grid.cuh"
#include "cuda/attention/common/score.cuh"

namespace tilewise::cuda {

// Where a mask of large negative numbers covers a whole row, the row's LSE in f32 is that number and nothing
// else, so P computed from it does not sum to 1. For such rows the highest score and the sum are computed
// again. They are few, mostly padding.

__device__ __forceinline__ bool is_far(float lse) { return fabsf(lse) > 1024 && !isinf(lse); }

struct FarSoftmax {
  float top = lowest;
  float sum = 0;

  __device__ void add(float s, float weight) {
    if (s == minus_infinity) return;
    const float highest = fmaxf(top, s);
    sum = sum * expf(top - highest) + weight * expf(s - highest);
    top = highest;
  }
};

/// The softmax of query i of entry b and head h, computed by one warp.
template <typename T>
__device__ FarSoftmax far_softmax(const AttentionCall& call, std::int64_t b, std::int64_t h, std::int64_t i,
                                  int lane) {
  const Sequence sequence = call.sequence(b);
  const std::int64_t place = call.packed() ? 0 : b;
  const ScoreRule rules(call, b, h);
  const KeyRange range = call.keys_of(sequence, i);
  const auto dims = static_cast<int>(call.problem.dim_qk);
  const std::byte* q_row = row_of_halves(call.q, place, h, sequence.first_q + i);
  FarSoftmax softmax;
  for (std::int64_t j = range.first + lane; j < range.last; j += 32) {
    KeyTile keys{j, 1};
    if (!meets<false>(call, {.b = b, .h = h, .first = i, .count = 1, .sequence = sequence}, keys) ||
        hidden(call, sequence, keys, i, j)) {
      continue;
    }
    const std::byte* k_row = row_of_halves(call.k, place, call.key_head(h), sequence.first_k + j);
    float product = 0;
    for (int d = 0; d < dims; d += 8) {
      float q[8], k[8];
      mma::load_eight<T>(q, q_row, d, dims, aligned_chunks(call.q));
      mma::load_eight<T>(k, k_row, d, dims, aligned_chunks(call.k));
#pragma unroll
      for (int n = 0; n < 8; ++n) product = fmaf(q[n], k[n], product);
    }
    float tangent;
    softmax.add(score_of(call, rules, sequence, b, h, i, j, product, tangent), 1);
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    const float top = __shfl_xor_sync(~0u, softmax.top, other);
    softmax.add(top, __shfl_xor_sync(~0u, softmax.sum, other));
  }
  if (call.problem.features.sinks) softmax.add(static_cast<float>(call.sinks.at(b, h)), 1);
  return softmax;
}

}  // namespace tilewise::cuda
