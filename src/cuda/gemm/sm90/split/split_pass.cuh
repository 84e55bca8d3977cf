#pragma once

#include "cuda/gemm/sm90/split/split_parts.h"
#include "cuda/ptx/matrix.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::gemm {

// Splitting factors, all of a product in one launch.

struct Splitting {
  struct Factor {
    Matrix matrix;
    Parts parts;
    Spread* spread = nullptr;
    int* marks = nullptr;
    std::int64_t first_block = 0;
  };
  Factor factors[3];
  int count = 0;
  std::int64_t blocks = 0;

  void add(const Matrix& matrix, const Parts& parts, Spread* spread, int* marks, std::int64_t of_blocks) {
    factors[count++] = {matrix, parts, spread, marks, blocks};
    blocks += of_blocks;
  }
  __device__ const Factor& of_block(std::int64_t block) const {
    int n = count - 1;
    while (block < factors[n].first_block) --n;
    return factors[n];
  }
};

inline constexpr int split_threads = 256;

/// The magnitude of a number as bits, which compare as numbers do; NaN is above all.
__device__ __forceinline__ int magnitude(float x) { return __float_as_int(x) & 0x7fffffff; }
/// From here on a number is not finite, or would not be as bf16.
inline constexpr int least_infinite = 0x7f7f8000;

/// 2^14 is what the largest number of a row is brought to. An exponent past 126 would be no f32's own.
__device__ __forceinline__ int exponent_of(int largest) {
  return largest == 0 ? 0 : min(14 - ((largest >> 23) - 127), 126);
}

/// What a thread, then a row's threads, have counted of Spread.
struct Counts {
  int small[Spread::grades] = {};
  int lossy = 0;

  /// A number as scaled.
  template <int parts>
  __device__ __forceinline__ void add(float x) {
    const int size = magnitude(x);
#pragma unroll
    for (int n = 0; n < Spread::grades; ++n) small[n] += size < (127 + 14 - Spread::grade(n)) << 23 ? 1 : 0;
    // f16 keeps what is a multiple of 2^-24.
    constexpr int least = (127 + (parts == 2 ? -2 : -14)) << 23;
    lossy += size != 0 && size < least ? 1 : 0;
  }
  __device__ void add_to(Spread& spread) const {
    const auto raise = [](int* to, int count) {
      if (count > *static_cast<volatile int*>(to)) atomicMax(to, count);  // rarely
    };
#pragma unroll
    for (int n = 0; n < Spread::grades; ++n) raise(&spread.small[n], small[n]);
    raise(&spread.lossy, lossy);
  }
};

/// Eight numbers of a row by their parts of f16, 16 bytes each.
template <int parts>
__device__ __forceinline__ void store_parts(const Splitting::Factor& factor, std::int64_t row,
                                            std::int64_t column, const float (&x)[8]) {
  uint4 high, low;
  std::uint32_t *high_words = &high.x, *low_words = &low.x;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    high_words[n] = pack<__half>(x[2 * n], x[2 * n + 1]);
    const float2 rounded = unpack<__half>(high_words[n]);
    low_words[n] = pack<__half>(x[2 * n] - rounded.x, x[2 * n + 1] - rounded.y);
  }
  std::uint16_t* to = factor.parts.data + row * factor.parts.stride + column;
  *reinterpret_cast<uint4*>(to) = high;
  if constexpr (parts == 2) *reinterpret_cast<uint4*>(to + factor.matrix.rows * factor.parts.stride) = low;
}

/// Rows that are contiguous: a block has one, of which it keeps `kept` · 2048 numbers in registers, and reads
/// what is more than that twice.
template <int parts, int kept>
__global__ void __launch_bounds__(split_threads) split_by_rows(const __grid_constant__ Splitting splitting) {
  constexpr int step = 8 * split_threads;
  const Splitting::Factor& factor = splitting.of_block(blockIdx.x);
  const std::int64_t row = blockIdx.x - factor.first_block;
  const auto columns = static_cast<int>(factor.matrix.columns);
  const auto* from = reinterpret_cast<const float*>(factor.matrix.data) + row * factor.matrix.stride_row;
  const int first = 8 * static_cast<int>(threadIdx.x);
  const auto load = [&](float(&x)[8], int column) {
    if (column + 8 <= columns) {
      *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(from + column);
      *reinterpret_cast<float4*>(x + 4) = *reinterpret_cast<const float4*>(from + column + 4);
      return;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = column + n < columns ? from[column + n] : 0.0f;
  };

  alignas(16) float x[kept][8];
  int largest = 0;
  const auto compare = [&](const float(&eight)[8]) {
#pragma unroll
    for (int n = 0; n < 8; ++n) largest = max(largest, magnitude(eight[n]));
  };
#pragma unroll
  for (int n = 0; n < kept; ++n) load(x[n], first + n * step);
#pragma unroll
  for (int n = 0; n < kept; ++n) compare(x[n]);
#pragma unroll 1
  for (int column = first + kept * step; column < columns; column += step) {
    alignas(16) float more[8];
    load(more, column);
    compare(more);
  }
  __shared__ int all_largest;
  __shared__ int all_counts[Spread::grades + 1];
  if (threadIdx.x == 0) all_largest = 0;
  if (threadIdx.x <= Spread::grades) all_counts[threadIdx.x] = 0;
  __syncthreads();  // they are 0
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&all_largest, largest);
  __syncthreads();  // everyone's is in it
  largest = all_largest;
  if (largest >= least_infinite) {
    if (threadIdx.x == 0) factor.marks[row / marked_rows] = 1;
    return;
  }

  const int exponent = exponent_of(largest);
  const float power = __int_as_float((exponent + 127) << 23);
  Counts counts;
  const auto split = [&](float(&eight)[8], int column) {
    if (column >= columns) return;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      eight[n] *= power;
      if (column + n < columns) counts.add<parts>(eight[n]);
    }
    store_parts<parts>(factor, row, column, eight);
  };
#pragma unroll
  for (int n = 0; n < kept; ++n) split(x[n], first + n * step);
#pragma unroll 1
  for (int column = first + kept * step; column < columns; column += step) {
    alignas(16) float more[8];
    load(more, column);
    split(more, column);
  }
#pragma unroll
  for (int n = 0; n <= Spread::grades; ++n) {
    const int count = __reduce_add_sync(~0u, n < Spread::grades ? counts.small[n] : counts.lossy);
    if (threadIdx.x % 32 == 0 && count != 0) atomicAdd(all_counts + n, count);
  }
  __syncthreads();  // everyone has counted
  if (threadIdx.x != 0) return;
  factor.parts.exponents[row] = exponent;
  if (largest == 0) return;  // nothing is lost of zeros
  for (int n = 0; n < Spread::grades; ++n) counts.small[n] = all_counts[n];
  counts.lossy = all_counts[Spread::grades];
  counts.add_to(*factor.spread);
}

/// Rows that lie across memory: a block has 32 and reads them twice, the second time from the L2, through
/// shared memory 256 summands at a time. There are few such blocks, hence their size.
inline constexpr int across_threads = 1024;
inline constexpr int across_rows = 32;

template <int parts>
__global__ void __launch_bounds__(across_threads)
    split_by_columns(const __grid_constant__ Splitting splitting) {
  constexpr int rows = across_rows, depth = across_threads / rows * 8, lines = across_threads / rows;
  __shared__ float transposed[depth][rows + 1];
  __shared__ int all_largest[rows];
  __shared__ int all_counts[rows][Spread::grades + 1];
  const Splitting::Factor& factor = splitting.of_block(blockIdx.x);
  const std::int64_t first_row = (blockIdx.x - factor.first_block) * rows;
  const std::int64_t columns = factor.matrix.columns;
  const int lane = static_cast<int>(threadIdx.x) % rows, line = static_cast<int>(threadIdx.x) / rows;
  const bool present = first_row + lane < factor.matrix.rows;
  const auto* from =
      reinterpret_cast<const float*>(factor.matrix.data) + (present ? first_row + lane : first_row);
  const auto load = [&](std::int64_t column) {
    return present && column < columns ? from[column * factor.matrix.stride_column] : 0.0f;
  };
  if (threadIdx.x < rows) {
    all_largest[lane] = 0;
    for (int n = 0; n <= Spread::grades; ++n) all_counts[lane][n] = 0;
  }
  __syncthreads();          // they are 0
  constexpr int batch = 8;  // loads under way
  int largest = 0;
#pragma unroll 1
  for (std::int64_t column = line; column < columns; column += batch * lines) {
    float x[batch];
#pragma unroll
    for (int n = 0; n < batch; ++n) x[n] = load(column + n * lines);
#pragma unroll
    for (int n = 0; n < batch; ++n) largest = max(largest, magnitude(x[n]));
  }
  atomicMax(all_largest + lane, largest);
  __syncthreads();  // everyone's is in it

  // Then a thread has eight summands of a row, and eight neighbours 64.
  const int row = static_cast<int>(threadIdx.x) / 8 % rows;
  const int chunk = static_cast<int>(threadIdx.x) % 8 + static_cast<int>(threadIdx.x) / (8 * rows) * 8;
  const int own_largest = all_largest[row];
  const bool finite = own_largest < least_infinite;
  const int exponent = finite ? exponent_of(own_largest) : 0;
  const float power = __int_as_float((exponent + 127) << 23);
  Counts counts;
#pragma unroll 1
  for (std::int64_t column = 0; column < columns; column += depth) {
    float x[depth / lines];
#pragma unroll
    for (int n = 0; n < depth / lines; ++n) x[n] = load(column + line + n * lines);
#pragma unroll
    for (int n = 0; n < depth / lines; ++n) transposed[line + n * lines][lane] = x[n];
    __syncthreads();  // as many summands are there
    const std::int64_t own = column + 8 * chunk;
    if (first_row + row < factor.matrix.rows && own < columns) {
      float eight[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        eight[n] = transposed[8 * chunk + n][row] * power;
        if (own + n < columns) counts.add<parts>(eight[n]);
      }
      store_parts<parts>(factor, first_row + row, own, eight);
    }
    __syncthreads();  // and were read
  }
#pragma unroll
  for (int n = 0; n <= Spread::grades; ++n) {
    const int count = n < Spread::grades ? counts.small[n] : counts.lossy;
    if (count != 0) atomicAdd(&all_counts[row][n], count);
  }
  __syncthreads();  // everyone has counted
  if (chunk != 0 || first_row + row >= factor.matrix.rows) return;
  if (!finite) {
    factor.marks[(first_row + row) / marked_rows] = 1;
    return;
  }
  factor.parts.exponents[first_row + row] = exponent;
  if (own_largest == 0) return;  // nothing is lost of zeros
  for (int n = 0; n < Spread::grades; ++n) counts.small[n] = all_counts[row][n];
  counts.lossy = all_counts[row][Spread::grades];
  counts.add_to(*factor.spread);
}

/// Into parts of bf16, where those of f16 do not do: squares of 32 x 32 numbers, turned in shared memory
/// where the factor lies by columns.
template <bool tf32>
__global__ void __launch_bounds__(split_threads)
    split_into_bf16(const __grid_constant__ Splitting splitting, const Findings* findings) {
  constexpr int square = 32;
  constexpr int lines = split_threads / square;
  if (fits_f16(findings->a, findings->b, splitting.factors[0].matrix.columns, tf32)) return;
  __shared__ float transposed[square][square + 1];
  const int lane = static_cast<int>(threadIdx.x) % square, line = static_cast<int>(threadIdx.x) / square;
#pragma unroll 1
  for (std::int64_t block = blockIdx.x; block < splitting.blocks; block += gridDim.x) {
    const Splitting::Factor& factor = splitting.of_block(block);
    const Matrix& matrix = factor.matrix;
    const std::int64_t across = (matrix.columns + square - 1) / square;
    const std::int64_t first_row = (block - factor.first_block) / across * square;
    const std::int64_t first_column = (block - factor.first_block) % across * square;
    const auto* from = reinterpret_cast<const float*>(matrix.data);
    const bool by_rows = matrix.by_rows();
#pragma unroll
    for (int n = line; n < square; n += lines) {
      const std::int64_t row = first_row + (by_rows ? n : lane), column = first_column + (by_rows ? lane : n);
      const bool there = row < matrix.rows && column < matrix.columns;
      transposed[by_rows ? n : lane][by_rows ? lane : n] = there ? from[matrix.offset(row, column)] : 0.0f;
    }
    __syncthreads();  // the square is there
#pragma unroll
    for (int n = line; n < square; n += lines) {
      const std::int64_t row = first_row + n, column = first_column + lane;
      if (row >= matrix.rows || column >= matrix.columns) continue;
      float rest = transposed[n][lane];
      for (int part = 0; part < factor.parts.count; ++part) {
        const __nv_bfloat16 piece = narrow<__nv_bfloat16>(rest);
        factor.parts.data[(part * matrix.rows + row) * factor.parts.stride + column] =
            __bfloat16_as_ushort(piece);
        rest -= widen(piece);
      }
    }
    __syncthreads();  // the square was read
  }
}

}  // namespace tilewise::cuda::gemm
