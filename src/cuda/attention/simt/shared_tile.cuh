#pragma once

#include "attention/call.h"
#include "cuda/attention/simt/multiply.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda {

// Loads f32 tiles [rows, dim] into shared memory, dim being a multiple of 4. Rows that several lanes read at
// once, four elements each, have a stride of dim + 4 floats, so that there are no bank conflicts.

/// Whether rows can be read and written four elements at a time.
__host__ __device__ __forceinline__ bool aligned_rows(const Rows& rows, std::int64_t dim) {
  const auto size = static_cast<std::int64_t>(size_of(rows.dtype));
  const std::int64_t strides = (rows.stride_b | rows.stride_h | rows.stride_s) * size;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows.data));
  return ((address | strides) & (4 * size - 1)) == 0 && dim % 4 == 0;
}

/// Whether load_plain_rows() can read the rows.
inline bool plain_rows(const Rows& rows, std::int64_t dim) {
  return rows.dtype == DType::f32 && aligned_rows(rows, dim);
}

/// The rows of an entry and head, which have a constant stride.
struct RowAddress {
  const Rows& rows;
  const std::byte* first;  ///< row 0
  bool aligned;

  __device__ RowAddress(const Rows& rows_, std::int64_t dim, std::int64_t b, std::int64_t h, std::int64_t row)
      : rows(rows_), first(rows_.at(b, h, row)), aligned(aligned_rows(rows_, dim)) {}
  __device__ const std::byte* at(std::int64_t row) const {
    return first + row * rows.stride_s * static_cast<std::int64_t>(size_of(rows.dtype));
  }
};
/// The same for rows that may be paged.
struct PagedRowAddress : RowAddress {
  const AttentionCall& call;
  std::int64_t b, h;

  __device__ PagedRowAddress(const AttentionCall& call_, const Rows& rows_, std::int64_t dim, std::int64_t b_,
                             std::int64_t h_, std::int64_t row)
      : RowAddress(rows_, dim, b_, h_, row), call(call_), b(b_), h(h_) {}
  __device__ const std::byte* at(std::int64_t row) const {
    if (call.problem.layout != Layout::paged) return RowAddress::at(row);
    return rows.at(call.page_at(b, row / call.page), h, row % call.page);
  }
};

/// Fills `tile`, which has `count` rows of `dim` floats at a stride of `stride`, with elements
/// [first, first + dims) of `valid` rows from row `begin` on, and with zeros elsewhere. The caller commits
/// and awaits the asynchronous copies; then a barrier makes the whole tile visible. This function takes
/// aligned f32 rows with a constant stride: one addition and one asynchronous copy for every 16 bytes.
template <int count, int dim, int stride, int threads>
__device__ __forceinline__ void load_plain_rows(float* tile, const RowAddress& from, std::int64_t begin,
                                                int valid, int first, int dims) {
  constexpr int chunks = dim / 4;
  constexpr int step = threads / chunks;  // distance between a thread's rows
  static_assert(threads % chunks == 0 && count % step == 0);
  const int row = static_cast<int>(threadIdx.x) / chunks;
  const int column = static_cast<int>(threadIdx.x) % chunks * 4;
  const float* source = reinterpret_cast<const float*>(from.at(begin)) + first;
  const std::int64_t next = from.rows.stride_s * step;
  float* to = tile + row * stride + column;
  if (valid >= count && dims >= dim) {
    source += row * from.rows.stride_s + column;
#pragma unroll
    for (int r = 0; r < count; r += step) {
      copy_async_16(to + r * stride, source, true);
      source += next;
    }
  } else {
#pragma unroll 1
    for (int r = row; r < count; r += step) {
      const bool present = r < valid && column < dims;
      copy_async_16(to, present ? source + r * from.rows.stride_s + column : source, present);
      to += step * stride;
    }
  }
}

template <typename T, int count, int dim, int stride, int threads, typename Address>
__device__ __forceinline__ void load_rows_of(float* tile, const Address& from, std::int64_t begin, int valid,
                                             int first, int dims) {
#pragma unroll 1
  for (int index = threadIdx.x; index < count * dim / 4; index += threads) {
    const int row = index / (dim / 4);
    const int column = index % (dim / 4) * 4;
    const bool present = row < valid && column < dims;
    const T* source =
        reinterpret_cast<const T*>(from.at(begin + (present ? row : 0))) + first + (present ? column : 0);
    float4 four{};
    if (present && from.aligned) {
      four = load_4(source);
    } else if (present) {
      four.x = widen(source[0]);
      if (column + 1 < dims) four.y = widen(source[1]);
      if (column + 2 < dims) four.z = widen(source[2]);
      if (column + 3 < dims) four.w = widen(source[3]);
    }
    *reinterpret_cast<float4*>(tile + row * stride + column) = four;
  }
}

/// The same for rows of any type, alignment and layout.
template <int count, int dim, int stride, int threads, typename Address>
__device__ __forceinline__ void load_any_rows(float* tile, const Address& from, std::int64_t begin, int valid,
                                              int first, int dims) {
  switch (from.rows.dtype) {
    case DType::f16:
      return load_rows_of<__half, count, dim, stride, threads>(tile, from, begin, valid, first, dims);
    case DType::bf16:
      return load_rows_of<__nv_bfloat16, count, dim, stride, threads>(tile, from, begin, valid, first, dims);
    default: return load_rows_of<float, count, dim, stride, threads>(tile, from, begin, valid, first, dims);
  }
}

template <bool any, int count, int dim, int stride, int threads, typename Address>
__device__ __forceinline__ void load_rows(float* tile, const Address& from, std::int64_t begin, int valid,
                                          int first, int dims) {
  if constexpr (any) {
    load_any_rows<count, dim, stride, threads>(tile, from, begin, valid, first, dims);
  } else {
    load_plain_rows<count, dim, stride, threads>(tile, from, begin, valid, first, dims);
  }
}

/// Transposes the first `depth` columns, a multiple of four, of `from` [rows, from_stride] into `to`
/// [depth, rows], multiplied by `factor`. A warp takes four columns of 32 rows, so neither side has a bank
/// conflict.
template <int rows, int from_stride, int threads>
__device__ __forceinline__ void transpose_rows(float* to, const float* from, int depth, float factor) {
  for (int index = threadIdx.x; index < rows * depth / 4; index += threads) {
    const int row = index % rows;
    const int column = index / rows * 4;
    const float4 four = load_four(from + row * from_stride + column);
#pragma unroll
    for (int n = 0; n < 4; ++n) to[(column + n) * rows + row] = element(four, n) * factor;
  }
}

/// Stores those of the elements [first, first + 4) of a row that are below `dims`; the type is a run-time
/// one.
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
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (first + n < dims) store_element(row + (first + n) * size_of(dtype), dtype, element(value, n));
  }
}

}  // namespace tilewise::cuda
