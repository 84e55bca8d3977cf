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
  const int used = (dims + 3) / 4;
  for (int index = threadIdx.x; index < rows * Tile::chunks; index += threads) {
    const int row = index / Tile::chunks;
    const int chunk = index % Tile::chunks;
    if (chunk >= used) continue;
    float* to = tile + Tile::at(row, chunk);
    const bool present = row < valid;
    const T* from = reinterpret_cast<const T*>(row_of(present ? row : 0)) + first + chunk * 4;
    if (aligned) {
      if constexpr (sizeof(T) == 4) {
        copy_async_16(to, from, present);
      } else {
        *reinterpret_cast<float4*>(to) = present ? load_4(from) : float4{};
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
/// `valid` on, and what pads dims to a multiple of four, are zero; chunks past that stay as they are. f32
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
