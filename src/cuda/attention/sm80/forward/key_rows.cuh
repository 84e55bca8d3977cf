#pragma once

#include "cuda/ptx/local.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

/// Fills a tile of `count` rows with the first `dims` elements of `valid` aligned rows, from row `first` on;
/// everything else is zero. For the loop over tiles, where registers are scarce and every instruction takes
/// from the products' time: rows are less than 2^31 bytes apart, so that an address is one multiply-add, and
/// what a thread would keep for itself is made anew from its number.
template <int count, int dim, int threads>
__device__ __forceinline__ void load_key_rows(std::byte* tile_smem, const std::byte* rows, int stride,
                                              int first, int valid, int dims) {
  using Tile = SwizzledTile<dim>;
  constexpr int lanes = std::bit_ceil(static_cast<unsigned>(Tile::chunks));  // of a row; some may stand idle
  constexpr int step = threads / lanes;                                      // rows between those of a thread
  static_assert(threads % lanes == 0 && count % step == 0 && (step % 8 == 0 || Tile::period == 8));
  const int thread = opaque(static_cast<int>(threadIdx.x));
  const int row = thread / lanes;
  const int chunk = thread % lanes;
  if (lanes > Tile::chunks && chunk >= Tile::chunks) return;
  const std::byte* from = rows + std::int64_t{stride} * (first + row) + chunk * 16;
  const int place = Tile::offset(row, chunk);
  const auto to = [&](int r) {  // rows that are no multiple of eight apart are turned otherwise
    return tile_smem + (place ^ (step < 8 ? r % 8 * 16 : 0)) + r * Tile::row_bytes;
  };
  if (valid >= count && dims == dim) {
#pragma unroll
    for (int r = 0; r < count; r += step) copy_async_16(to(r), from + std::int64_t{stride} * r, true);
  } else {
    const int bytes = max(0, min(16, (dims - chunk * 8) * 2));
#pragma unroll 1
    for (int r = 0; r < count; r += step) {
      const bool present = row + r < valid && bytes > 0;
      copy_async_part(to(r), present ? from + std::int64_t{stride} * r : rows, present ? bytes : 0);
    }
  }
}

}  // namespace tilewise::cuda::mma
