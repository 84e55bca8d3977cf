#pragma once

#include "cuda/norm/config.h"
#include "cuda/norm/rows.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::norm {

/// Where blocks leave their sums: [blocks, dim] each, null where a gradient is not wanted.
struct Partials {
  float* weight = nullptr;
  float* bias = nullptr;
};

/// Each warp's sums of a column, one warp after another, to the block's.
template <typename T, int chunks, bool one_warp>
__device__ __forceinline__ void leave_partials(const float (&sums)[chunks][chunk_size<T>], float* to,
                                               int count) {
  constexpr int size = chunk_size<T>;
  using Row = Team<one_warp>;
  if (to == nullptr) return;
  to += static_cast<std::int64_t>(blockIdx.x) * count * size;
  for (int team = 0; team < Row::per_block(); ++team) {
    if (!one_warp || static_cast<int>(threadIdx.x) / 32 == team) {
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

}  // namespace tilewise::cuda::norm
