#pragma once

#include "core/arena.h"
#include "cuda/norm/common/config.h"
#include "cuda/norm/common/rows.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::norm {

/// Where blocks leave their sums: [blocks, dim] each, null where a gradient is not wanted.
struct Partials {
  float* weight = nullptr;
  float* bias = nullptr;
};

inline Partials take_partials(Arena& arena, const NormCall& call, int pieces) {
  const std::int64_t count = pieces * call.problem.dim;
  Partials partials;
  if (call.d_weight.data != nullptr) partials.weight = arena.take<float>(count);
  if (call.d_bias.data != nullptr) partials.bias = arena.take<float>(count);
  return partials;
}

/// A chunk's sums, all lanes of a warp together, of chunks side by side: 32 bytes of memory, which is what it
/// takes at a time, are written at once. Word by word, as sums lie in lanes, they took eight times as many
/// transactions. Of chunks of eight, neighbouring lanes each write one half of both.
template <int size>
__device__ __forceinline__ void store_sums(float* to, const float (&sums)[size], int at, int count) {
  if constexpr (size == 4) {
    if (at < count) *reinterpret_cast<float4*>(to + at * size) = {sums[0], sums[1], sums[2], sums[3]};
  } else {
    static_assert(size == 8);
    const int odd = static_cast<int>(threadIdx.x) % 2;
    float even_chunk[4], odd_chunk[4];  // of either the lane's half
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float other = __shfl_xor_sync(~0u, odd ? sums[n] : sums[4 + n], 1);
      even_chunk[n] = odd ? other : sums[n];
      odd_chunk[n] = odd ? sums[4 + n] : other;
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

/// Each warp's sums of a column, one warp after another, to the block's.
template <typename T, int chunks, bool one_warp>
__device__ __forceinline__ void leave_partials(const float (&sums)[chunks][chunk_size<T>], float* to,
                                               int count) {
  constexpr int size = chunk_size<T>;
  using Row = Team<one_warp>;
  if (to == nullptr) return;
  to += static_cast<std::int64_t>(blockIdx.x) * count * size;
  if constexpr (!one_warp) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) store_sums<size>(to, sums[c], Row::thread() + c * Row::size(), count);
  } else {
    for (int team = 0; team < Row::per_block(); ++team) {
      if (static_cast<int>(threadIdx.x) / 32 == team) {
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          const int at = Row::thread() + c * Row::size();
          if (at >= count) continue;
#pragma unroll
          for (int n = 0; n < size; ++n) {
            float* place = to + at * size + n;
            *place = sums[c][n] + (team == 0 ? 0.0f : *place);
          }
        }
      }
      __syncthreads();  // this warp's are in
    }
  }
}

}  // namespace tilewise::cuda::norm
