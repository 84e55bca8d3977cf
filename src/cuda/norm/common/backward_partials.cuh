#pragma once

#include "core/arena.h"
#include "cuda/norm/common/config.h"
#include "cuda/norm/common/rows.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::norm {

/// Where CTAs store their sums of the gradients of weight and bias: [CTAs, dim] each, null where a gradient
/// is not asked for.
struct Partials {
  float* weight = nullptr;
  float* bias = nullptr;
};

inline Partials take_partials(Arena& arena, const NormCall& call, int partial_count) {
  const std::int64_t count = partial_count * call.problem.dim;
  Partials partials;
  if (call.d_weight.data != nullptr) partials.weight = arena.take<float>(count);
  if (call.d_bias.data != nullptr) partials.bias = arena.take<float>(count);
  return partials;
}

/// Stores a chunk of sums. All lanes of a warp call it, with neighbouring chunks. It writes 32 bytes, a
/// sector of memory, at once; writing word by word took eight times as many transactions. With chunks of
/// eight, two neighbouring lanes exchange halves, and each writes one half of both chunks.
template <int size>
__device__ __forceinline__ void store_sums(float* to, const float (&values)[size], int at, int count) {
  if constexpr (size == 4) {
    if (at < count) *reinterpret_cast<float4*>(to + at * size) = {values[0], values[1], values[2], values[3]};
  } else {
    static_assert(size == 8);
    const int odd = static_cast<int>(threadIdx.x) % 2;
    float even_chunk[4], odd_chunk[4];  // the lane's half of each
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float other = __shfl_xor_sync(~0u, odd ? values[n] : values[4 + n], 1);
      even_chunk[n] = odd ? other : values[n];
      odd_chunk[n] = odd ? values[4 + n] : other;
    }
    const int even = at - odd;
    float* const first = to + even * size + 4 * odd;
    if (even < count) {
      *reinterpret_cast<float4*>(first) = {even_chunk[0], even_chunk[1], even_chunk[2], even_chunk[3]};
    }
    if (even + 1 < count) {
      *reinterpret_cast<float4*>(first + size) = {odd_chunk[0], odd_chunk[1], odd_chunk[2], odd_chunk[3]};
    }
  }
}

/// Adds up the sums of the CTA's teams and stores them as the CTA's partials. Where a team is a warp, warps
/// add theirs one after another.
template <typename T, int chunks, bool one_warp>
__device__ __forceinline__ void store_partials(const float (&values)[chunks][chunk_size<T>], float* to,
                                               int count) {
  constexpr int size = chunk_size<T>;
  using Row = Team<one_warp>;
  if (to == nullptr) return;
  to += static_cast<std::int64_t>(blockIdx.x) * count * size;
  if constexpr (!one_warp) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) store_sums<size>(to, values[c], Row::thread() + c * Row::size(), count);
  } else {
    for (int team = 0; team < Row::per_block(); ++team) {
      if (static_cast<int>(threadIdx.x) / 32 == team) {
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          const int at = Row::thread() + c * Row::size();
          if (at >= count) continue;
#pragma unroll
          for (int n = 0; n < size; ++n) {
            float* sum = to + at * size + n;
            *sum = values[c][n] + (team == 0 ? 0.0f : *sum);
          }
        }
      }
      __syncthreads();  // this warp has added its sums, which the next one reads
    }
  }
}

}  // namespace tilewise::cuda::norm
