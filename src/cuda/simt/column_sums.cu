#include "cuda/simt/column_sums.h"

#include <algorithm>

#include "cuda/runtime/launch.cuh"
#include "cuda/tile/element.cuh"

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

// 32 columns a block: eight threads have a column, each every eighth strip.
__global__ void __launch_bounds__(threads)
    partials_kernel(const float* partials, std::int64_t strips, std::int64_t columns,
                    const __grid_constant__ Vector sums) {
  __shared__ float of_groups[8][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, group = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t n = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;
  float sum = 0;
  if (n < columns) {
#pragma unroll 4
    for (std::int64_t strip = group; strip < strips; strip += 8) sum += partials[strip * columns + n];
  }
  of_groups[group][lane] = sum;
  __syncthreads();  // all groups' are there
  if (group > 0 || n >= columns) return;
  for (int other = 1; other < 8; ++other) sum += of_groups[other][lane];
  store_element(sums.data + n * sums.stride * static_cast<std::int64_t>(size_of(sums.dtype)), sums.dtype,
                sum);
}

}  // namespace

int row_strips(std::int64_t rows, std::int64_t columns, int multiprocessors) {
  const std::int64_t column_blocks = std::max<std::int64_t>((columns + threads - 1) / threads, 1);
  const std::int64_t wanted = (8 * multiprocessors + column_blocks - 1) / column_blocks;  // blocks of 256
  return static_cast<int>(std::clamp<std::int64_t>(std::min(wanted, rows / 8), 1, 1024));
}

void sum_strips(const Matrix& x, float* partials, int strips, const Context& context) {
  const std::int64_t column_blocks = (x.columns + threads - 1) / threads;
  launch<strips_kernel>({.name = "tilewise sums of strips",
                         .blocks = column_blocks * strips,
                         .threads = threads,
                         .stream = static_cast<cudaStream_t>(context.stream)},
                        x, partials, strips, static_cast<int>(column_blocks));
}

void sum_partials(const float* partials, std::int64_t strips, std::int64_t columns, const Vector& sums,
                  const Context& context) {
  launch<partials_kernel>({.name = "tilewise sums of partials",
                           .blocks = (columns + 31) / 32,
                           .threads = threads,
                           .stream = static_cast<cudaStream_t>(context.stream)},
                          partials, strips, columns, sums);
}

}  // namespace tilewise::cuda
