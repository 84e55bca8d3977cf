#pragma once

#include "cuda/gemm/sm90/split/split_parts.h"
#include "cuda/ptx/matrix.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::gemm {

// The kernels that split operands. One launch splits all operands of a GEMM that it suits. With `items`, an
// operand is several matrices of one shape.

/// The operands that a launch splits, and which of its CTAs have which.
struct Splitting {
  struct Operand {
    Matrix matrix;
    Parts parts;
    Spread* spread = nullptr;
    int* marks = nullptr;
    std::int64_t first_block = 0;
    std::int64_t item_stride = 0;  ///< elements from one matrix to the next
    VisibleBand visible;           ///< of one of several matrices
    ShownTiles shown;
    bool tiles_have_spreads = false;
  };
  Operand operands[3];
  int count = 0;
  std::int64_t blocks = 0;

  void add(Operand operand, std::int64_t ctas) {
    operand.first_block = blocks;
    operands[count++] = operand;
    blocks += ctas;
  }
  __device__ const Operand& of_block(std::int64_t block) const {
    int n = count - 1;
    while (block < operands[n].first_block) --n;
    return operands[n];
  }
};

inline constexpr int split_threads = 256;

/// Where a row of the parts comes from.
struct SourceRow {
  const float* item;  ///< its matrix
  std::int64_t row;   ///< in the matrix
  bool is_padding;    ///< the matrix has no such row

  template <bool items>
  __device__ static SourceRow of(const Splitting::Operand& operand, std::int64_t row) {
    const auto* first = reinterpret_cast<const float*>(operand.matrix.data);
    if constexpr (!items) return {first, row, false};
    const std::int64_t item = row / operand.parts.item_rows;
    const std::int64_t own = row - item * operand.parts.item_rows;
    return {first + item * operand.item_stride, own, own >= operand.matrix.rows};
  }
};

/// The columns of a row that are split. The first is a multiple of 64.
template <bool items>
__device__ __forceinline__ Span columns_of(const Splitting::Operand& operand, std::int64_t row) {
  const auto columns = static_cast<int>(operand.matrix.columns);
  if constexpr (!items) return {0, columns};
  const auto own = static_cast<int>(row % operand.parts.item_rows);
  return operand.visible.of_rows(own / item_tile * item_tile, item_tile).whole_units(item_stage, columns);
}
/// Whether a column of a row is split, among columns_of().
template <bool items>
struct ShownColumns {
  const Splitting::Operand& operand;
  const int item, tile;  ///< of the row

  __device__ __forceinline__ ShownColumns(const Splitting::Operand& operand, std::int64_t row)
      : operand(operand),
        item(items ? static_cast<int>(row / operand.parts.item_rows) : 0),
        tile(items ? static_cast<int>(row % operand.parts.item_rows / item_tile) : 0) {}
  __device__ __forceinline__ bool at(std::int64_t column) const {
    return !items || operand.shown.at(item, tile, static_cast<int>(column / item_tile));
  }
};
template <bool items>
__device__ __forceinline__ Spread& spread_of(const Splitting::Operand& operand, std::int64_t row) {
  return operand.spread[items && operand.tiles_have_spreads ? row / marked_rows : 0];
}

/// The bits of |x|, which compare as the numbers do; those of NaN are the largest.
__device__ __forceinline__ int magnitude(float x) { return __float_as_int(x) & 0x7fffffff; }
/// The least magnitude that is infinite, NaN, or would round to infinity as bf16.
inline constexpr int least_infinite = 0x7f7f8000;

/// The exponent that brings the largest number of a row to 2^14. It is at most 126, so that 2^exponent and
/// 2^-exponent are normal numbers of f32.
__device__ __forceinline__ int exponent_of(int largest) {
  return largest == 0 ? 0 : min(14 - ((largest >> 23) - 127), 126);
}

/// The counts of Spread for a thread, and then for all threads of a row.
struct Counts {
  int small[Spread::grades] = {};
  int lossy = 0;

  /// Counts a number that has been scaled.
  template <int parts>
  __device__ __forceinline__ void add(float x) {
    const int size = magnitude(x);
#pragma unroll
    for (int n = 0; n < Spread::grades; ++n) small[n] += size < (127 + 14 - Spread::grade(n)) << 23 ? 1 : 0;
    // The spacing of f16 is at least 2^-24, too coarse for the parts of numbers below `least`.
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

/// Stores the f16 parts of eight numbers of a row, 16 bytes for each part.
template <int parts>
__device__ __forceinline__ void store_parts(const Splitting::Operand& operand, std::int64_t row,
                                            std::int64_t column, const float (&x)[8]) {
  uint4 high, low;
  std::uint32_t *high_words = &high.x, *low_words = &low.x;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    high_words[n] = pack<__half>(x[2 * n], x[2 * n + 1]);
    const float2 rounded = unpack<__half>(high_words[n]);
    low_words[n] = pack<__half>(x[2 * n] - rounded.x, x[2 * n + 1] - rounded.y);
  }
  std::uint16_t* to = operand.parts.data + row * operand.parts.stride + column;
  *reinterpret_cast<uint4*>(to) = high;
  if constexpr (parts == 2) *reinterpret_cast<uint4*>(to + operand.parts.rows * operand.parts.stride) = low;
}

/// Splits operands with contiguous rows into f16, one row per CTA. Up to `kept` · 2048 numbers of a row stay
/// in registers between finding the largest and splitting; numbers past them are read twice.
template <int parts, int kept, bool items = false>
__global__ void __launch_bounds__(split_threads) split_by_rows(const __grid_constant__ Splitting splitting) {
  constexpr int step = 8 * split_threads;
  const Splitting::Operand& operand = splitting.of_block(blockIdx.x);
  const std::int64_t row = blockIdx.x - operand.first_block;
  const Span all = columns_of<items>(operand, row);
  const ShownColumns<items> shown(operand, row);
  const int columns = all.last;
  const SourceRow source = SourceRow::of<items>(operand, row);
  const int all_present = source.is_padding ? 0 : columns;
  const float* from = source.item + source.row * operand.matrix.stride_row;
  const int first = all.first + 8 * static_cast<int>(threadIdx.x);
  const auto load = [&](float(&x)[8], int column) {
    int present = all_present;
    if (items && column < present && !shown.at(column)) present = 0;
    if (column + 8 <= present) {
      *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(from + column);
      *reinterpret_cast<float4*>(x + 4) = *reinterpret_cast<const float4*>(from + column + 4);
      return;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = column + n < present ? from[column + n] : 0.0f;
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
  __syncthreads();  // all_largest and all_counts are 0
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&all_largest, largest);
  __syncthreads();  // all warps have added theirs
  largest = all_largest;
  if (largest >= least_infinite) {
    if (threadIdx.x == 0) operand.marks[row / marked_rows] = 1;
    return;
  }

  const int exponent = exponent_of(largest);
  const float power = __int_as_float((exponent + 127) << 23);
  Counts counts;
  const auto split = [&](float(&eight)[8], int column) {
    if (column >= columns || !shown.at(column)) return;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      eight[n] *= power;
      if (column + n < columns) counts.add<parts>(eight[n]);
    }
    store_parts<parts>(operand, row, column, eight);
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
  __syncthreads();  // all warps have added their counts
  if (threadIdx.x != 0) return;
  operand.parts.exponents[row] = exponent;
  if (largest == 0) return;  // zeros lose nothing
  for (int n = 0; n < Spread::grades; ++n) counts.small[n] = all_counts[n];
  counts.lossy = all_counts[Spread::grades];
  counts.add_to(spread_of<items>(operand, row));
}

/// Splits operands whose columns are contiguous into f16, 32 rows per CTA. A CTA reads its rows twice, the
/// second time from the L2, and transposes 256 of K at a time in shared memory. There are few such CTAs,
/// hence their size.
inline constexpr int across_threads = 1024;
inline constexpr int across_rows = 32;

template <int parts, bool items = false>
__global__ void __launch_bounds__(across_threads)
    split_by_columns(const __grid_constant__ Splitting splitting) {
  constexpr int rows = across_rows, depth = across_threads / rows * 8, lines = across_threads / rows;
  __shared__ float transposed[depth][rows + 1];
  __shared__ int all_largest[rows];
  __shared__ int all_counts[rows][Spread::grades + 1];
  const Splitting::Operand& operand = splitting.of_block(blockIdx.x);
  const std::int64_t first_row = (blockIdx.x - operand.first_block) * rows;
  const Span all = columns_of<items>(operand, first_row);  // 32 rows are of one tile
  const ShownColumns<items> shown(operand, first_row);
  const std::int64_t columns = all.last;
  const int lane = static_cast<int>(threadIdx.x) % rows, line = static_cast<int>(threadIdx.x) / rows;
  const SourceRow source = SourceRow::of<items>(operand, first_row);  // 32 rows are of one matrix
  const bool present = source.row + lane < operand.matrix.rows;
  const float* from = source.item + (present ? source.row + lane : source.row);
  const auto load = [&](std::int64_t column) {
    return present && column < columns && shown.at(column) ? from[column * operand.matrix.stride_column]
                                                           : 0.0f;
  };
  if (threadIdx.x < rows) {
    all_largest[lane] = 0;
    for (int n = 0; n <= Spread::grades; ++n) all_counts[lane][n] = 0;
  }
  __syncthreads();          // all_largest and all_counts are 0
  constexpr int batch = 8;  // loads in flight
  int largest = 0;
#pragma unroll 1
  for (std::int64_t column = all.first + line; column < columns; column += batch * lines) {
    float x[batch];
#pragma unroll
    for (int n = 0; n < batch; ++n) x[n] = load(column + n * lines);
#pragma unroll
    for (int n = 0; n < batch; ++n) largest = max(largest, magnitude(x[n]));
  }
  atomicMax(all_largest + lane, largest);
  __syncthreads();  // all threads have added theirs

  // Now a thread has eight of K of one row, and eight neighbouring threads have 64 of it.
  const int row = static_cast<int>(threadIdx.x) / 8 % rows;
  const int chunk = static_cast<int>(threadIdx.x) % 8 + static_cast<int>(threadIdx.x) / (8 * rows) * 8;
  const int own_largest = all_largest[row];
  const bool finite = own_largest < least_infinite;
  const int exponent = finite ? exponent_of(own_largest) : 0;
  const float power = __int_as_float((exponent + 127) << 23);
  Counts counts;
#pragma unroll 1
  for (std::int64_t column = all.first; column < columns; column += depth) {
    float x[depth / lines];
#pragma unroll
    for (int n = 0; n < depth / lines; ++n) x[n] = load(column + line + n * lines);
#pragma unroll
    for (int n = 0; n < depth / lines; ++n) transposed[line + n * lines][lane] = x[n];
    __syncthreads();  // `depth` of K are in shared memory
    const std::int64_t own = column + 8 * chunk;
    if (first_row + row < operand.parts.rows && own < columns && shown.at(own)) {
      float eight[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        eight[n] = transposed[8 * chunk + n][row] * power;
        if (own + n < columns) counts.add<parts>(eight[n]);
      }
      store_parts<parts>(operand, first_row + row, own, eight);
    }
    __syncthreads();  // all threads have read them, so the next may overwrite them
  }
#pragma unroll
  for (int n = 0; n <= Spread::grades; ++n) {
    const int count = n < Spread::grades ? counts.small[n] : counts.lossy;
    if (count != 0) atomicAdd(&all_counts[row][n], count);
  }
  __syncthreads();  // all threads have added their counts
  if (chunk != 0 || first_row + row >= operand.parts.rows) return;
  if (!finite) {
    operand.marks[(first_row + row) / marked_rows] = 1;
    return;
  }
  operand.parts.exponents[first_row + row] = exponent;
  if (own_largest == 0) return;  // zeros lose nothing
  for (int n = 0; n < Spread::grades; ++n) counts.small[n] = all_counts[row][n];
  counts.lossy = all_counts[row][Spread::grades];
  counts.add_to(spread_of<items>(operand, first_row + row));
}

inline constexpr int square = 32;

/// Splits a square of 32 x 32 numbers of an operand into bf16 parts. If its columns are contiguous, it is
/// transposed in shared memory.
template <bool items>
__device__ __forceinline__ void split_square(const Splitting::Operand& operand, std::int64_t first_row,
                                             std::int64_t first_column,
                                             float (&transposed)[square][square + 1]) {
  constexpr int lines = split_threads / square;
  const int lane = static_cast<int>(threadIdx.x) % square, line = static_cast<int>(threadIdx.x) / square;
  const Matrix& matrix = operand.matrix;
  const SourceRow source = SourceRow::of<items>(operand, first_row);  // 32 rows are of one matrix
  const bool by_rows = matrix.by_rows();
#pragma unroll
  for (int n = line; n < square; n += lines) {
    const std::int64_t row = source.row + (by_rows ? n : lane);
    const std::int64_t column = first_column + (by_rows ? lane : n);
    const bool inside = row < matrix.rows && column < matrix.columns;
    transposed[by_rows ? n : lane][by_rows ? lane : n] =
        inside ? source.item[matrix.offset(row, column)] : 0.0f;
  }
  __syncthreads();  // the square is in shared memory
#pragma unroll
  for (int n = line; n < square; n += lines) {
    const std::int64_t row = first_row + n, column = first_column + lane;
    if (row >= operand.parts.rows || column >= matrix.columns) continue;
    float remainder = transposed[n][lane];
    for (int part = items ? operand.parts.first_bf16 : 0; part < operand.parts.count; ++part) {
      const __nv_bfloat16 rounded = narrow<__nv_bfloat16>(remainder);
      operand.parts.data[(part * operand.parts.rows + row) * operand.parts.stride + column] =
          __bfloat16_as_ushort(rounded);
      remainder -= widen(rounded);
    }
  }
  __syncthreads();  // all threads have read it, so the next may overwrite it
}

/// Splits all operands into bf16 parts, if f16 is not exact enough.
template <bool tf32>
__global__ void __launch_bounds__(split_threads)
    split_into_bf16(const __grid_constant__ Splitting splitting, const Findings* findings) {
  if (fits_f16(findings->a, findings->b, splitting.operands[0].matrix.columns, tf32)) return;
  __shared__ float transposed[square][square + 1];
#pragma unroll 1
  for (std::int64_t block = blockIdx.x; block < splitting.blocks; block += gridDim.x) {
    const Splitting::Operand& operand = splitting.of_block(block);
    const std::int64_t across = (operand.matrix.columns + square - 1) / square;
    split_square<false>(operand, (block - operand.first_block) / across * square,
                        (block - operand.first_block) % across * square, transposed);
  }
}

/// The least number of large terms for f16 parts. A sum of one term, such as P = 1 where a query sees one
/// key, has no error in f32. f16 parts of it have 22 to 24 bits.
inline constexpr int least_terms = 16;

/// Columns that a block of split_tiles_into_bf16 has, of 32 rows.
inline constexpr int bf16_columns = 16 * square;

/// The same for several GEMMs, where each tile of rows of A decides for itself: with causal, the rows of the
/// first tile see so few keys that no bound holds for f16, and a hidden key of B counts like a visible one.
/// Of B it splits the columns that such tiles multiply. Also stores the decisions.
template <typename Unused = void>
__global__ void __launch_bounds__(split_threads)
    split_tiles_into_bf16(const __grid_constant__ Splitting splitting, const Findings* findings,
                          const __grid_constant__ UnitPlan plan) {
  const Splitting::Operand& a = splitting.operands[0];
  const auto columns = static_cast<int>(a.matrix.columns);
  const auto fits = [&](int tile) {
    const int count = plan.columns != nullptr ? plan.columns[tile]
                                              : columns_of<true>(a, std::int64_t{tile} * marked_rows).count();
    return count == 0 || fits_f16(plan.spreads[tile], findings->b, count - least_terms, false);
  };
  __shared__ float transposed[square][square + 1];
  __shared__ int last, before_first;  // of the columns of B, the latter counted from their end
  if (threadIdx.x == 0) last = before_first = 0;
  __syncthreads();  // both are 0
#pragma unroll 1
  for (int tile = static_cast<int>(threadIdx.x); tile < plan.row_tiles; tile += split_threads) {
    const bool fit = fits(tile);
    if (blockIdx.x == 0) plan.fit_f16[tile] = fit ? 1 : 0;
    if (fit) continue;
    const Span own = columns_of<true>(a, std::int64_t{tile} * marked_rows);
    atomicMax(&last, own.last);
    atomicMax(&before_first, columns - own.first);
  }
  __syncthreads();  // all threads have added the tiles that do not fit
  const Span of_b{columns - before_first, last};
  if (last == 0) return;
#pragma unroll 1
  for (std::int64_t block = blockIdx.x; block < splitting.blocks; block += gridDim.x) {
    const Splitting::Operand& operand = splitting.of_block(block);
    const std::int64_t across = (columns + bf16_columns - 1) / bf16_columns;
    const std::int64_t row = (block - operand.first_block) / across * square;
    const auto column = static_cast<int>((block - operand.first_block) % across * bf16_columns);
    const bool is_a = operand.tiles_have_spreads;
    const ShownColumns<true> shown(operand, row);
    const Span split = is_a ? columns_of<true>(operand, row) : of_b;
    const int first = max(column, split.first), end = min(column + bf16_columns, split.last);
    if (first >= end || (is_a && fits(static_cast<int>(row / marked_rows)))) continue;
#pragma unroll 1
    for (int at = first; at < end; at += square) {
      if (shown.at(at)) split_square<true>(operand, row, at, transposed);
    }
  }
}

inline constexpr int plan_threads = 1024;

/// Lists the stages that a block mask leaves of a tile of rows. Returns their places in the list.
__device__ inline Span listed_stages(const ShownTiles& shown, const UnitPlan& plan, int tile,
                                     const Span& stages) {
  int* list = plan.stage_lists + std::int64_t{tile} * plan.stages;
  int count = 0;
  for (int stage = stages.first; stage < stages.last; ++stage) {
    const int column_tile = stage * item_stage / item_tile;
    if (shown.at(tile / plan.item_row_tiles, tile % plan.item_row_tiles, column_tile)) list[count++] = stage;
  }
  const bool has_last = count > 0 && list[count - 1] + 1 == plan.stages;
  plan.columns[tile] = count * item_stage - (has_last ? plan.stages * item_stage - plan.k : 0);
  return {0, count};
}

/// Lists the units of several GEMMs, and clears what is counted while splitting. One CTA.
template <typename Unused = void>
__global__ void __launch_bounds__(plan_threads)
    plan_units(const __grid_constant__ Items items, const __grid_constant__ UnitPlan plan,
               const bool accumulate, int* cleared, const int clear) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  for (int n = thread; n < clear; n += plan_threads) cleared[n] = 0;
  // Calls visit(unit) for each unit of a tile of rows, in order.
  const auto for_each_unit = [&](int tile, const auto& visit) {
    const int item = tile / plan.item_row_tiles, row_tile = tile % plan.item_row_tiles;
    const Span visible = items.visible.of_rows(row_tile * item_tile, item_tile);
    if (!items.over_k) {
      const Span tiles = visible.in_units(item_tile);
      for (int n = tiles.first; n < tiles.last; ++n) {
        if (items.shown.at(item, row_tile, n)) visit(Unit{tile, n, 0, {0, plan.stages}});
      }
      return;
    }
    Span own = visible.in_units(item_stage);
    if (items.shown.any_hidden()) own = listed_stages(items.shown, plan, tile, own);
    if (own.count() == 0 && accumulate) return;
    const int slices = items.shown.any_hidden() ? items.slices : slices_of(own, items.longest_slice);
    for (int n = 0; n < slices; ++n) visit(Unit{tile, 0, n, slice_of(own, n, slices)});
  };
  const int tiles_each = (plan.row_tiles + plan_threads - 1) / plan_threads;
  const int first = min(thread * tiles_each, plan.row_tiles), end = min(first + tiles_each, plan.row_tiles);
  int count = 0;
  for (int tile = first; tile < end; ++tile) for_each_unit(tile, [&](const Unit&) { ++count; });

  // The sum of the counts of all threads before this one.
  const auto scan = [&](int x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, x, step);
      if (lane >= step) x += before;
    }
    return x;
  };
  __shared__ int of_warps[32];
  const int in_warp = scan(count);
  if (lane == 31) of_warps[thread / 32] = in_warp;
  __syncthreads();  // the sums of all warps are there
  const int up_to_warps = scan(of_warps[lane]);
  const int before_warp =
      __shfl_sync(~0u, up_to_warps, thread / 32) - __shfl_sync(~0u, of_warps[lane], thread / 32);
  int at = before_warp + in_warp - count;
  for (int tile = first; tile < end; ++tile)
    for_each_unit(tile, [&](const Unit& unit) { plan.units[at++] = unit; });
  if (thread == plan_threads - 1) *plan.count = at;
}

}  // namespace tilewise::cuda::gemm
