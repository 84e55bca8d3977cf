#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "attention/call.h"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda {

// Tiles of 16-bit elements in shared memory, [rows, dim] with dim a multiple of 32, in chunks of 16 bytes. A
// chunk's place in its row is exclusive-ored with the row's number. So the same chunk of eight consecutive
// rows, which is what ldmatrix reads and eight lanes store, covers each of the 32 banks once.

template <int dim>
struct SwizzledTile {
  static_assert(dim % 32 == 0);
  static constexpr int chunks = dim / 8;
  static constexpr int row_bytes = dim * 2;
  /// The number of chunks that are permuted among themselves. If rows have an odd multiple of 64 bytes, they
  /// start alternately in either half of the banks, so four chunks are enough.
  static constexpr int period = dim % 64 == 0 ? 8 : 4;

  static constexpr int phase_of(int row) { return period == 8 ? row & 7 : (row >> 1) & 3; }
  /// Offset in bytes from the tile's address, which is a multiple of 128.
  static constexpr int offset(int row, int chunk) { return row * row_bytes + ((chunk ^ phase_of(row)) * 16); }
};

/// The address that a lane gives ldmatrix: that of the tile's first fragment, and from there in steps of 16
/// rows and 16 columns. A step takes one exclusive or and constants, since it does not change phase_of.
template <int dim>
struct MatrixPointer {
  using Tile = SwizzledTile<dim>;
  std::uint32_t at_smem;

  /// For an A operand from a row-major [m, k]: the matrices of rows 0 to 7 and 8 to 15, then those of the
  /// next eight columns. For a B operand from a row-major [k, n], loaded transposed: two fragments of eight
  /// columns each.
  static __device__ MatrixPointer by_rows(std::uint32_t tile_smem) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return {tile_smem + Tile::offset(lane % 16, lane / 16)};
  }
  /// For a B operand from a row-major [n, k]: two fragments of eight rows each.
  static __device__ MatrixPointer by_columns(std::uint32_t tile_smem) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return {tile_smem + Tile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2)};
  }
  /// `rows` is a multiple of 16, `column` counts steps of 16 columns.
  __device__ std::uint32_t at(int rows, int column) const {
    constexpr int steps = Tile::period / 2;
    return (at_smem ^ (column % steps * 32)) + column / steps * steps * 32 + rows * Tile::row_bytes;
  }
  /// The pointer of a part of the tile. `column` is a multiple of the part's number of columns, a power of
  /// two.
  __device__ MatrixPointer from(int rows, int column) const { return {at(rows, column)}; }
};

/// The address of row (b, h, s) of 16-bit elements.
__device__ __forceinline__ std::byte* row_of_halves(const Rows& rows, std::int64_t b, std::int64_t h,
                                                    std::int64_t s) {
  return rows.data + (b * rows.stride_b + h * rows.stride_h + s * rows.stride_s) * 2;
}

/// Whether rows of 16-bit elements can be read and written 16 bytes at a time.
__host__ __device__ __forceinline__ bool aligned_chunks(const Rows& rows) {
  const std::int64_t strides = (rows.stride_b | rows.stride_h | rows.stride_s) * 2;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows.data));
  return ((address | strides) & 15) == 0;
}

/// Fills a tile of `count` rows with the first `dims` elements of `valid` aligned rows at a stride of
/// `stride` bytes, and with zeros elsewhere. The caller commits and awaits the copies.
template <int count, int dim, int threads>
__device__ __forceinline__ void load_strided_rows(std::byte* tile_smem, const std::byte* first,
                                                  std::int64_t stride, int valid, int dims) {
  using Tile = SwizzledTile<dim>;
  constexpr int lanes = std::bit_ceil(static_cast<unsigned>(Tile::chunks));  // per row; some may be idle
  constexpr int step = threads / lanes;     // distance between a thread's rows
  constexpr int round = std::max(step, 8);  // rows after which the swizzle repeats
  static_assert(threads % lanes == 0 && count % round == 0 && round % step == 0);
  const int row = static_cast<int>(threadIdx.x) / lanes;
  const int chunk = static_cast<int>(threadIdx.x) % lanes;
  if (lanes > Tile::chunks && chunk >= Tile::chunks) return;
  const std::byte* source = first + row * stride + chunk * 16;
  if (valid >= count && dims == dim) {
#pragma unroll
    for (int r = 0; r < count; r += step) {
      std::byte* to = tile_smem + Tile::offset(row + r % round, chunk) + r / round * round * Tile::row_bytes;
      copy_async_16(to, source, true);
      source += step * stride;
    }
  } else {
    const int bytes = max(0, min(16, (dims - chunk * 8) * 2));
#pragma unroll 1
    for (int r = row; r < count; r += step) {
      const bool present = r < valid && bytes > 0;
      copy_async_part(tile_smem + Tile::offset(r, chunk), present ? source : first, present ? bytes : 0);
      source += step * stride;
    }
  }
}

/// The rows of a tile in their natural order.
struct InOrder {
  static constexpr int key(int r) { return r; }
};

/// The same for rows at any addresses: row r of the tile is the one at `from(Order::key(r))`. Rows that are
/// not `aligned` are loaded by elements and stored without asynchronous copies, so a barrier must follow.
template <int count, int dim, int threads, typename Order = InOrder, typename From>
__device__ __forceinline__ void load_any_rows(std::byte* tile_smem, const From& from, bool aligned, int valid,
                                              int dims) {
  using Tile = SwizzledTile<dim>;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < count * Tile::chunks; index += threads) {
    const int row = index / Tile::chunks;
    const int chunk = index % Tile::chunks;
    const int key = Order::key(row);
    std::byte* to = tile_smem + Tile::offset(row, chunk);
    const int elements = key < valid ? max(0, min(8, dims - chunk * 8)) : 0;
    if (elements > 0 && aligned) {
      copy_async_part(to, from(key) + chunk * 16, elements * 2);
      continue;
    }
    uint4 eight{};
    if (elements > 0) {
      const auto* source = reinterpret_cast<const std::uint16_t*>(from(key)) + chunk * 8;
      const auto two = [&](int n) {
        const std::uint32_t low = n < elements ? source[n] : 0;
        const std::uint32_t high = n + 1 < elements ? source[n + 1] : 0;
        return low | high << 16;
      };
      eight = {two(0), two(2), two(4), two(6)};
    }
    *reinterpret_cast<uint4*>(to) = eight;
  }
}

/// Writes eight elements to a row from element `first` on, except those from `dims` on.
__device__ __forceinline__ void store_eight(std::byte* row_gmem, int first, int dims, bool aligned,
                                            const uint4& eight) {
  if (first + 8 <= dims && aligned) {
    *reinterpret_cast<uint4*>(row_gmem + first * 2) = eight;
    return;
  }
  auto* to = reinterpret_cast<std::uint16_t*>(row_gmem) + first;
  const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (first + n < dims) to[n] = static_cast<std::uint16_t>(words[n / 2] >> (n % 2 * 16));
  }
}

}  // namespace tilewise::cuda
