#include "cuda/tile/column_sums.h"

#include <algorithm>

#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/team.cuh"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda {
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads)
    strips_kernel(const __grid_constant__ Matrix x, float* partials, int strips, int column_blocks) {
  const std::int64_t strip = blockIdx.x / column_blocks;
  const std::int64_t n = static_cast<std::int64_t>(blockIdx.x % column_blocks) * threads + threadIdx.x;
  if (n >= x.columns) return;
  const std::int64_t first = x.rows * strip / strips, last = x.rows * (strip + 1) / strips;
  float sum = 0;
#pragma unroll 4
  for (std::int64_t m = first; m < last; ++m) sum += load_element(x.at(m, n), x.dtype);
  partials[strip * x.columns + n] = sum;
}

// The same with loads of 16 bytes: a warp has 32 neighbouring chunks, and each of the CTA's eight warps has
// every eighth row of the strip.
template <typename T>
__global__ void __launch_bounds__(threads)
    chunk_strips_kernel(const __grid_constant__ Matrix x, float* partials, int strips, int column_blocks) {
  constexpr int size = chunk_size<T>, warps = threads / 32;
  __shared__ float of_warps[warps][32 * size];
  const std::int64_t strip = blockIdx.x / column_blocks, first_chunk = blockIdx.x % column_blocks * 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t n = (first_chunk + lane) * size;
  const std::int64_t last = x.rows * (strip + 1) / strips;
  float sums[size] = {};
  if (n < x.columns) {
#pragma unroll 4
    for (std::int64_t m = x.rows * strip / strips + warp; m < last; m += warps) {
      float values[size];
      load_chunk(values, reinterpret_cast<const T*>(x.data) + m * x.stride_row + n);
#pragma unroll
      for (int e = 0; e < size; ++e) sums[e] += values[e];
    }
  }
#pragma unroll
  for (int e = 0; e < size; ++e) of_warps[warp][e * 32 + lane] = sums[e];
  __syncthreads();  // all warps have stored their sums
  for (int at = static_cast<int>(threadIdx.x); at < 32 * size; at += threads) {
    const std::int64_t column = (first_chunk + at / size) * size + at % size;
    if (column >= x.columns) continue;
    float sum = 0;
    for (int other = 0; other < warps; ++other) sum += of_warps[other][at % size * 32 + at / size];
    partials[strip * x.columns + column] = sum;
  }
}

struct BothSums {
  PartialSums of[2];
};

// A CTA has 32 columns: 32 threads per column, each with every 32nd strip. The grid's second layer computes
// the second sums.
constexpr int groups = 32;
__global__ void __launch_bounds__(32 * groups)
    partials_kernel(const __grid_constant__ BothSums both, std::int64_t strips, std::int64_t columns) {
  const float* partials = both.of[blockIdx.y].partials;
  const Vector& sums = both.of[blockIdx.y].sums;
  __shared__ float of_groups[groups][33];
  const int lane = static_cast<int>(threadIdx.x) % 32, group = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t n = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;
  let_next_kernel_start();
  wait_for_previous_kernel();
  float sum = 0;
  if (n < columns) {
#pragma unroll 8
    for (std::int64_t strip = group; strip < strips; strip += groups) sum += partials[strip * columns + n];
  }
  of_groups[group][lane] = sum;
  __syncthreads();  // all groups have stored their sums; from here on each warp has a column
  sum = warp_sum(of_groups[lane][group]);
  const std::int64_t own = static_cast<std::int64_t>(blockIdx.x) * 32 + group;
  if (lane > 0 || own >= columns) return;
  store_element(sums.data + own * sums.stride * static_cast<std::int64_t>(size_of(sums.dtype)), sums.dtype,
                sum);
}

}  // namespace

int row_strips(std::int64_t rows, std::int64_t columns, int multiprocessors) {
  const std::int64_t column_blocks = std::max<std::int64_t>((columns + threads - 1) / threads, 1);
  const std::int64_t wanted = (8 * multiprocessors + column_blocks - 1) / column_blocks;  // blocks of 256
  return static_cast<int>(std::clamp<std::int64_t>(std::min(wanted, rows / 8), 1, 1024));
}

void sum_strips(const Matrix& x, float* partials, int strips, const Context& context) {
  const auto run = [&]<auto kernel>(int columns) {
    const std::int64_t column_blocks = (x.columns + columns - 1) / columns;
    launch<kernel>({.name = "tilewise sums of strips",
                    .blocks = column_blocks * strips,
                    .threads = threads,
                    .stream = static_cast<cudaStream_t>(context.stream)},
                   x, partials, strips, static_cast<int>(column_blocks));
  };
  const auto in_chunks = [&]<typename T>() {
    x.by_rows() && x.aligned() && x.columns % chunk_size<T> == 0
        ? run.template operator()<chunk_strips_kernel<T>>(32 * chunk_size<T>)
        : run.template operator()<strips_kernel>(threads);
  };
  with_type(x.dtype, in_chunks);
}

void sum_partials(const PartialSums& first, const PartialSums& second, std::int64_t strips,
                  std::int64_t columns, const Context& context) {
  const bool has_first = first.partials != nullptr, has_second = second.partials != nullptr;
  if (!has_first && !has_second) return;
  launch<partials_kernel>({.name = "tilewise sums of partials",
                           .blocks = (columns + 31) / 32,
                           .threads = 32 * groups,
                           .layers = has_first && has_second ? 2 : 1,
                           .stream = static_cast<cudaStream_t>(context.stream),
                           .early = has_pdl(context.device)},
                          BothSums{{has_first ? first : second, second}}, strips, columns);
}

}  // namespace tilewise::cuda
