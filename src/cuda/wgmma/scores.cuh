#pragma once

#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/wgmma/arguments.h"

namespace tilewise::cuda::wgmma {

// A consumer's scores, weights and o. A lane has two rows of its warp's 16, g and g + 8, and columns 8j + 2t
// and 8j + 2t + 1 of each: of row half h, element 4j + 2h + e (wgmma.cuh).

template <ForwardConfig c>
using Scores = float[c.keys / 2];
template <ForwardConfig c>
using Output = float[c.dim_v / 2];
/// Weights as factors of a product, 16 keys after another.
template <ForwardConfig c>
using Weights = std::uint32_t[c.keys / 16][4];

/// Starts s = q·k; both in panels of 64 dims.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void start_scores(Scores<c>& s, TileDescriptor q, TileDescriptor k) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  pin(s);
  fence_products();
#pragma unroll
  for (int step = 0; step < c.dim / 16; ++step) {
    const int panel = step / 4;
    const int inside = step % 4 * 2;  // 16 dims are two chunks
    WarpgroupProduct<T, c.keys>::from_shared(s, q + panel * (64 * 128 / 16) + inside,
                                             k + panel * (c.keys * 128 / 16) + inside, step > 0);
  }
  commit_products();
#endif
}

/// Starts o += weights·v.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void start_output(Output<c>& o, Weights<c>& weights, TileDescriptor v) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  pin(o);
  pin(weights);
  fence_products();
#pragma unroll
  for (int step = 0; step < c.keys / 16; ++step) {
    WarpgroupProduct<T, c.dim_v>::from_registers(o, weights[step], v + step * (16 * 128 / 16));
  }
  commit_products();
#endif
}

/// Hides what the band hides. `key` is the lane's first of the tile, `query` that of row g.
template <ForwardConfig c>
__device__ __forceinline__ void hide(Scores<c>& s, const BandOfKeys& band, int query, int key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = band.first(query + 8 * half) - key;
    const int last = band.last(query + 8 * half) - key;
#pragma unroll
    for (int n = 0; n < c.keys / 4; ++n) {
      const int column = n / 2 * 8 + n % 2;
      float& score = s[n / 2 * 4 + 2 * half + n % 2];
      if (column < first || column >= last) score = minus_infinity;
    }
  }
}

/// The weights, rounded.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void round_weights(Weights<c>& weights, const Scores<c>& s) {
#pragma unroll
  for (int n = 0; n < c.keys / 4; ++n) weights[n / 4][n % 4] = pack<T>(s[2 * n], s[2 * n + 1]);
}

}  // namespace tilewise::cuda::wgmma
