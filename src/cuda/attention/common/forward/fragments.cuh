#pragma once

namespace tilewise::cuda::mma {

// Scores and results as mma.sync holds them. A lane has two rows, g and g + 8, of each row tile, and two
// columns 8n + 2t and 8n + 2t + 1 of each; four neighbouring lanes share a row.

/// Finite: a row that saw nothing needs no special case.
inline constexpr float lowest = -3.402823466e38f;

/// Scores of a lane, by row tile, eight keys, and place in the fragment; and o in the same form.
template <auto c>
using Scores = float[c.row_tiles][c.keys / 8][4];
template <auto c>
using Output = float[c.row_tiles][c.dim / 8][4];

/// Over the four lanes that share a row.
__device__ __forceinline__ float row_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace tilewise::cuda::mma
