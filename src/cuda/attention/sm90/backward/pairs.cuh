#pragma once

#include "cuda/attention/sm90/backward/block.cuh"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda::wgmma_backward {

// Weights and score gradients of a warpgroup's 64 keys by a tile of 64 queries, as they come out of wgmma: a
// lane has element e of eight j of the queries, (key lane / 4 + 8 (e / 2), query 8j + 2 (lane % 4) + e % 2).

using Pairs = float[32];
using Fragments = std::uint32_t[4][4];  ///< the same rounded, for products over queries, 16 of these each

/// Rows of keys or values in registers, as one factor.
template <int dim>
using RowFragments = std::uint32_t[dim / 16][4];

/// k·qᵀ or v·d_oᵀ of a tile.
template <typename T, int dim, int keys>
__device__ __forceinline__ void start_product(Pairs& sums, TileDescriptor rows, TileDescriptor queries) {
#pragma unroll
  for (int step = 0; step < dim / 16; ++step) {
    const int panel = step / 4, part = step % 4 * 2;
    WarpgroupProduct<T, 64>::from_shared(sums, rows + panel * (keys * 128 / 16) + part,
                                         queries + panel * (Config::queries * 128 / 16) + part, step > 0);
  }
}
template <typename T, int dim>
__device__ __forceinline__ void start_product(Pairs& sums, const RowFragments<dim>& rows,
                                              TileDescriptor queries) {
#pragma unroll
  for (int step = 0; step < dim / 16; ++step) {
    const int panel = step / 4, part = step % 4 * 2;
    WarpgroupProduct<T, 64>::template from_registers<0>(
        sums, rows[step], queries + panel * (Config::queries * 128 / 16) + part, step > 0);
  }
}
template <typename Block, int steps>
__device__ __forceinline__ void load_fragments(const Block& block, std::uint32_t (&to)[steps][4],
                                               const std::byte* rows_smem) {
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int lane = block.lane();
    load_matrices(to[step],
                  Block::address(rows_smem) +
                      Block::KeyPanels::offset(block.first_own_key() + lane % 16, 2 * step + lane / 16));
  }
}

/// Numbers of a lane's queries.
struct OfQueries {
  float2 value[8];

  __device__ __forceinline__ void load(const float* own_smem) {
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] = *reinterpret_cast<const float2*>(own_smem + 8 * j);
  }
  __device__ __forceinline__ float at(int index) const {
    return index % 2 == 0 ? value[index / 4].x : value[index / 4].y;
  }
};

/// d_o·v to x, d_o·v + shift, in the score gradients' scale over that of weights.
template <typename T>
__device__ __forceinline__ void add_shifts(const OfQueries& shifts, float scale_up, Pairs& x) {
  const float unit = scale_up / static_cast<float>(1 << mma::weight_bits<T>);
#pragma unroll
  for (int index = 0; index < 32; ++index) {
    const float own = shifts.at(index);
    x[index] = mma::weight_bits<T> > 0 ? fmaf(x[index], unit, own * unit) : x[index] + own;
  }
}

/// Hides what the band hides, and keys past the end.
template <typename Block>
__device__ __forceinline__ void hide(const Block& block, const TileFacts& queries, Pairs& s) {
  const float hidden = block.unit > 0 ? minus_infinity : -minus_infinity;
  const int own = opaque(block.first_own_key() + block.lane() / 4);
  const int low = opaque(queries.low);
  const int high = opaque(queries.high);
  const int key_count = block.key_count();
#pragma unroll
  for (int q = 0; q < 16; ++q) {
    const int r = 8 * (q / 2) + 2 * (block.lane() % 4) + q % 2;
    hide_outside<WgmmaTransposedView<64>>(s, q, r + low - own, min(r + high, key_count) - own, hidden);
  }
}

/// Scores to weights, in the scale of weights.
template <typename T, int first, int end>
__device__ __forceinline__ void weigh(const OfQueries& tops, float unit, Pairs& s) {
#pragma unroll
  for (int index = first; index < end; ++index) {
    s[index] = exp2_approx(fmaf(s[index], unit, mma::weight_bits<T> - tops.at(index)));
  }
}

/// Weights and score gradients, rounded.
template <typename T>
__device__ __forceinline__ void round_pairs(const Pairs& p, const Pairs& x, Fragments& weights,
                                            Fragments& dscores) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    weights[n / 4][n % 4] = pack<T>(p[2 * n], p[2 * n + 1]);
    dscores[n / 4][n % 4] = pack<T>(p[2 * n] * x[2 * n], p[2 * n + 1] * x[2 * n + 1]);
  }
}

/// Fragments to their place in shared memory, [keys, queries].
template <typename Block>
__device__ __forceinline__ void store_pairs(const Block& block, int pair_stage, const Fragments& pairs) {
  const int lane = block.lane();
  const typename Block::PairPointer to{
      Block::address(block.dscores_smem + pair_stage * Config::pair_bytes()) +
      SwizzledTile<Config::queries>::offset(block.first_own_key() + lane % 16, lane / 16)};
#pragma unroll
  for (int step = 0; step < 4; ++step) store_matrices(to.at(0, step), pairs[step]);
}

}  // namespace tilewise::cuda::wgmma_backward
