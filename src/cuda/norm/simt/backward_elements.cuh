#pragma once

#include "cuda/norm/common/backward_partials.cuh"
#include "cuda/tile/bias.cuh"

namespace tilewise::cuda::norm {

// Rows that do not lie in chunks of 16 bytes, or are longer than shared memory.

/// A row a block, element by element.
template <typename T, Norm norm>
__global__ void __launch_bounds__(256) elements_kernel(const __grid_constant__ NormCall call) {
  using Row = Team<false>;
  const std::int64_t m = blockIdx.x;
  const std::int64_t dim = call.problem.dim;
  const float mean = norm == Norm::layer ? statistic(call.mean, m) : 0.0f;
  const float rstd = statistic(call.rstd, m);
  const auto g_of = [&](std::int64_t d) {
    const float dy = widen(row_of<T>(call.dy, m)[d]);
    return call.weight.data == nullptr ? dy : dy * bias_at<T>(call.weight, d);
  };
  const auto normal_of = [&](std::int64_t d) { return (widen(row_of<T>(call.x, m)[d]) - mean) * rstd; };
  float sums[2] = {0, 0};
  for (std::int64_t d = threadIdx.x; d < dim; d += blockDim.x) {
    sums[0] += g_of(d) * normal_of(d);
    sums[1] += g_of(d);
  }
  Row::sum(sums, 0);
  const float inverse = 1.0f / static_cast<float>(dim);
  const float shift = norm == Norm::layer ? sums[1] * inverse : 0.0f;
  for (std::int64_t d = threadIdx.x; d < dim; d += blockDim.x) {
    float dx = rstd * (g_of(d) - shift - normal_of(d) * (sums[0] * inverse));
    if (call.d_sum.data != nullptr) dx += widen(row_of<T>(call.d_sum, m)[d]);
    row_of<T>(call.dx, m)[d] = narrow<T>(dx);
  }
}

/// The gradients of weight and bias for strips of rows, a column a thread.
template <typename T, Norm norm>
__global__ void __launch_bounds__(256)
    columns_kernel(const __grid_constant__ NormCall call, const __grid_constant__ Partials partials,
                   int strips, int column_blocks) {
  const std::int64_t strip = blockIdx.x / column_blocks;
  const std::int64_t d = static_cast<std::int64_t>(blockIdx.x % column_blocks) * blockDim.x + threadIdx.x;
  if (d >= call.problem.dim) return;
  float weight = 0, bias = 0;
  const std::int64_t last = call.problem.rows * (strip + 1) / strips;
  for (std::int64_t m = call.problem.rows * strip / strips; m < last; ++m) {
    const float dy = widen(row_of<T>(call.dy, m)[d]);
    const float mean = norm == Norm::layer ? statistic(call.mean, m) : 0.0f;
    weight += dy * (widen(row_of<T>(call.x, m)[d]) - mean) * statistic(call.rstd, m);
    bias += dy;
  }
  if (partials.weight != nullptr) partials.weight[strip * call.problem.dim + d] = weight;
  if (partials.bias != nullptr) partials.bias[strip * call.problem.dim + d] = bias;
}

}  // namespace tilewise::cuda::norm
