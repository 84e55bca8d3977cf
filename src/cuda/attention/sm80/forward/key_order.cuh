#pragma once

#include "cuda/attention/common/accumulator.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

/// The order of the keys in a tile of the general kernel. Row r of the K tile in shared memory is column r of
/// S, and lane t of a row's four lanes has columns 2t and 2t + 1 of every eight. Keys are stored in such rows
/// that these are keys 4t to 4t + 3 of every 16: four keys that share a draw of dropout, and whose elements
/// of a mask are contiguous.
struct KeyOrder {
  /// The lane's first key, and the distance from it to element e of eight columns n.
  static __device__ int first(int lane) { return 4 * (lane % 4); }
  static constexpr int step(int n, int e) { return n / 2 * 16 + n % 2 * 2 + e; }
  /// The key in row r.
  static constexpr int key(int r) { return r / 16 * 16 + r % 8 / 2 * 4 + r / 8 % 2 * 2 + r % 2; }
};

/// The view of S in this order.
template <int row_tiles, int key_eights>
struct FoursView : MmaView<row_tiles, key_eights> {
  static __device__ __forceinline__ constexpr int step(int k) { return KeyOrder::step(k / 2, k % 2); }
};

/// Fills a tile of `count` keys in this order with aligned rows that are `stride` bytes apart; load_any_rows
/// takes other rows.
template <int count, int dim, int threads>
__device__ __forceinline__ void load_strided_keys(std::byte* tile_smem, const std::byte* first,
                                                  std::int64_t stride) {
  using Tile = SwizzledTile<dim>;
  constexpr int step = threads / Tile::chunks;  // rows from one of a thread to its next
  static_assert(threads % Tile::chunks == 0 && count % step == 0);
  const int row = static_cast<int>(threadIdx.x) / Tile::chunks;
  const int chunk = static_cast<int>(threadIdx.x) % Tile::chunks;
#pragma unroll
  for (int r = 0; r < count; r += step) {
    copy_async_16(tile_smem + Tile::offset(row + r, chunk),
                  first + KeyOrder::key(row + r) * stride + chunk * 16, true);
  }
}

}  // namespace tilewise::cuda::mma
