#pragma once

#include "attention/call.h"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda {

// Tiles of f32 in shared memory, [rows, dim] with dim a multiple of 4, as chunks of four. The chunks of a row
// are permuted by xor so that threads that read one column of several rows meet no bank twice; `shift` says
// which rows those are: rows that differ in bits shift to shift + 2.

template <int dim_, int shift>
struct SharedTile {
  static constexpr int dim = dim_;
  static constexpr int chunks = dim / 4;
  static constexpr int floats(int rows) { return rows * dim; }

  __device__ static int swizzle(int row) { return (row >> shift) & 7; }
  __device__ static int at(int row, int chunk) { return row * dim + ((chunk ^ swizzle(row)) << 2); }
};

/// A tile turned round, [k, columns]: what is summed over runs along the rows. Four columns that make a chunk
/// stay together; chunks are permuted by xor with k / 4, so that turning a tile meets no bank twice.
template <int columns_>
struct TurnedTile {
  static constexpr int columns = columns_;
  static constexpr int chunks = columns / 4;
  static constexpr int floats(int depth) { return depth * columns; }

  __device__ static int swizzle(int k) { return (k >> 2) & 7; }
  __device__ static int chunk(int k, int c) { return k * chunks + (c ^ swizzle(k)); }
};

/// The same without a permutation, for tiles that lie so already.
template <int columns_>
struct PlainTile {
  static constexpr int columns = columns_;
  static constexpr int chunks = columns / 4;
  __device__ static int chunk(int k, int c) { return k * chunks + c; }
};

/// Turns the first `dims` (a multiple of four) columns of `from`, [rows, dim] as loaded, into `to`, [dim,
/// rows], times `factor`. A warp takes four rows by eight chunks, so neither side has a bank conflict.
template <int rows, int dim, int threads>
__device__ __forceinline__ void turn_tile(float* to, const float* from, int dims, float factor) {
  using Turned = TurnedTile<rows>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = static_cast<int>(threadIdx.x) / 32 * 4 + lane / 8; row < rows; row += threads / 8) {
    for (int c = lane % 8; c < dims / 4; c += 8) {
      const float4 value = *reinterpret_cast<const float4*>(from + row * dim + c * 4);
      float* at =
          to + Turned::chunk(c * 4, row / 4) * 4 + row % 4;  // the four share k / 4, so they differ by a row
      at[0] = value.x * factor;
      at[rows] = value.y * factor;
      at[2 * rows] = value.z * factor;
      at[3 * rows] = value.w * factor;
    }
  }
}

/// Whether rows can be read and written four elements at a time.
__device__ __forceinline__ bool aligned_rows(const Rows& rows, std::int64_t dim) {
  const auto size = static_cast<std::int64_t>(size_of(rows.dtype));
  const std::int64_t strides = (rows.stride_b | rows.stride_h | rows.stride_s) * size;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows.data));
  return ((address | strides) & (4 * size - 1)) == 0 && dim % 4 == 0;
}

template <typename T, typename Tile, int threads, typename RowOf>
__device__ __forceinline__ void load_tile_of(float* tile, int rows, int valid, int first, int dims,
                                             bool aligned, const RowOf& row_of) {
  const int used = (dims + 7) / 8 * 2;
  for (int index = threadIdx.x; index < rows * Tile::chunks; index += threads) {
    const int row = index / Tile::chunks;
    const int chunk = index % Tile::chunks;
    if (chunk >= used) continue;
    float* to = tile + Tile::at(row, chunk);
    const bool present = row < valid;
    const bool inside = present && chunk * 4 < dims;
    const T* from = reinterpret_cast<const T*>(row_of(present ? row : 0)) + first + (inside ? chunk * 4 : 0);
    if (aligned) {
      if constexpr (sizeof(T) == 4) {
        copy_async_16(to, from, inside);
      } else {
        *reinterpret_cast<float4*>(to) = inside ? load_4(from) : float4{};
      }
    } else {
      float lane[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) lane[n] = present && chunk * 4 + n < dims ? widen(from[n]) : 0.0f;
      *reinterpret_cast<float4*>(to) = float4{lane[0], lane[1], lane[2], lane[3]};
    }
  }
}

/// Fills `tile` with elements [first, first + dims) of `rows` rows; row_of(r) is a row's address. Rows from
/// `valid` on, and what pads dims to a multiple of eight, are zero; chunks past that stay as they are. f32
/// rows that are aligned go by asynchronous copies, to be committed and awaited by the caller; everything
/// else is there after a barrier.
template <typename Tile, int threads, typename RowOf>
__device__ __forceinline__ void load_tile(float* tile, int rows, int valid, int first, int dims, DType dtype,
                                          bool aligned, const RowOf& row_of) {
  switch (dtype) {
    case DType::f16:
      return load_tile_of<__half, Tile, threads>(tile, rows, valid, first, dims, aligned, row_of);
    case DType::bf16:
      return load_tile_of<__nv_bfloat16, Tile, threads>(tile, rows, valid, first, dims, aligned, row_of);
    default: return load_tile_of<float, Tile, threads>(tile, rows, valid, first, dims, aligned, row_of);
  }
}

/// Where rows [first, …) of an entry and head lie: at a stride, or, paged, wherever their pages are.
struct RowAddress {
  const AttentionCall& call;
  const Rows& rows;
  std::int64_t b, h, first;
  bool paged;

  __device__ const std::byte* at(int r) const {
    if (!paged) return rows.at(b, h, first + r);
    return rows.at(call.page_table.at(b, (first + r) / call.page), h, (first + r) % call.page);
  }
};

/// The general case of load_rows, out of line: what it costs is not paid by others, in registers or in code.
template <int count, int dim, int threads>
__device__ __noinline__ void load_any_rows(float* tile, const RowAddress& from, int valid, int first,
                                           int dims, bool aligned) {
  load_tile<SharedTile<dim, 31>, threads>(tile, count, valid, first, dims, from.rows.dtype, aligned,
                                          [&](int r) { return from.at(r); });
}

/// load_tile into [count, dim] without a permutation. Aligned f32 rows at a stride, the case that must be
/// quick, take an addition and a copy for every chunk.
template <int count, int dim, int threads>
__device__ __forceinline__ void load_rows(float* tile, const RowAddress& from, int valid, int first, int dims,
                                          bool aligned) {
  if (from.paged || !aligned || from.rows.dtype != DType::f32) {
    return load_any_rows<count, dim, threads>(tile, from, valid, first, dims, aligned);
  }
  constexpr int chunks = dim / 4;
  constexpr int step = threads / chunks;  // rows between those of a thread
  static_assert(threads % chunks == 0 && count % step == 0);
  const int row = static_cast<int>(threadIdx.x) / chunks;
  const int column = static_cast<int>(threadIdx.x) % chunks * 4;
  const bool inside = column < dims;
  const float* source = reinterpret_cast<const float*>(from.at(0)) + first + (inside ? column : 0);
  const std::int64_t stride = from.rows.stride_s;
  float* to = tile + row * dim + column;
#pragma unroll 4
  for (int r = row; r < count; r += step) {
    const bool present = inside && r < valid;
    copy_async_16(to, present ? source + r * stride : source, present);
    to += step * dim;
  }
}

/// Stores elements first, first + 1, … of a row of a run-time type, as many of the four as lie below `dims`.
__device__ __forceinline__ void store_chunk(std::byte* row, DType dtype, int first, int dims, bool aligned,
                                            float4 value) {
  if (first >= dims) return;
  if (aligned) {
    switch (dtype) {
      case DType::f16: return store_4(reinterpret_cast<__half*>(row) + first, value);
      case DType::bf16: return store_4(reinterpret_cast<__nv_bfloat16*>(row) + first, value);
      default: return store_4(reinterpret_cast<float*>(row) + first, value);
    }
  }
  const float lane[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (first + n < dims) store_element(row + (first + n) * size_of(dtype), dtype, lane[n]);
  }
}

}  // namespace tilewise::cuda
