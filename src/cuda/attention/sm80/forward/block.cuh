#pragma once

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/common/forward/scores.cuh"
#include "cuda/attention/common/key_tiles.cuh"
#include "cuda/attention/sm80/forward/products.cuh"
#include "cuda/attention/sm80/forward/softmax.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// What blocks of the plain kernel, of the general one and of paired warps have in common.

/// Where a block's tiles are in shared memory.
template <ForwardConfig c>
struct BlockSpace {
  std::byte* q_smem;  ///< [rows, dim]
  std::byte* k_smem;  ///< stages x [keys, dim]
  std::byte* v_smem;  ///< stages x [keys, dim]

  __device__ explicit BlockSpace(std::byte* shared)
      : q_smem(shared), k_smem(q_smem + c.query_bytes()), v_smem(k_smem + c.stages * c.key_bytes()) {}

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ std::byte* keys_at(int stage) const { return k_smem + stage * c.key_bytes(); }
  __device__ std::byte* values_at(int stage) const { return v_smem + stage * c.key_bytes(); }
  /// The queries of a warp.
  __device__ MatrixPointer<c.dim> queries_of(const Place<c>& place) const {
    return MatrixPointer<c.dim>::by_rows(address(q_smem + place.first_row() * c.row_bytes()));
  }
};

/// Keys that every query of a block sees.
struct SeenByAll {
  const int first, last;

  __device__ SeenByAll(const AttentionCall& call, const QueryRows& rows)
      : first(static_cast<int>(rows.queries.all(call).first)),
        last(static_cast<int>(rows.queries.all(call).last)) {}

  /// Whether the band or the last key may hide something in a tile of `most` keys.
  __device__ bool ends_in(const KeyTile& keys, int most) const {
    const auto first_key = static_cast<int>(keys.first);
    return first_key < first || first_key > last - most || keys.count < most;
  }
};

/// What weights of the tile at hand are relative to, and what they sum to.
template <ForwardConfig c>
struct TileSums {
  float references[c.row_tiles][2], sums[c.row_tiles][2];

  template <bool general>
  __device__ __forceinline__ void begin(const Exponents<general>& exponents, const SoftmaxRows<c>& softmax) {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        references[r][half] = exponents.reference(softmax.maximum[r][half]);
        sums[r][half] = 0;
      }
    }
  }
  __device__ __forceinline__ void add_to(SoftmaxRows<c>& softmax) const {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) softmax.sum[r][half] += sums[r][half];
    }
  }
};

}  // namespace tilewise::cuda::mma
