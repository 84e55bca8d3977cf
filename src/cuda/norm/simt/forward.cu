#include "cuda/norm/common/config.h"
#include "cuda/norm/common/dispatch.cuh"
#include "cuda/norm/common/rows.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/bias.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::norm {
namespace {

/// CTAs of a launch with few rows, such as in decoding.
constexpr unsigned small_grid = 64;

/// Each team, a warp or a CTA, has one row. It is read once and stays in registers until the result is
/// written.
template <typename T, Norm norm, int chunks, bool one_warp>
__global__ void __launch_bounds__(most_threads<chunks, one_warp>)
    chunks_kernel(const __grid_constant__ NormCall call) {
  constexpr int size = chunk_size<T>;
  using Row = Team<one_warp>;
  // PDL: with few rows, the GEMM that follows may start early and prefetch its first weights. With many it
  // may not: gate and up of 4096 tokens took a fifth longer then.
  if (gridDim.x <= small_grid) let_next_kernel_start();
  wait_for_previous_kernel();  // it may write the inputs
  const std::int64_t m = Row::number();
  if (m >= call.problem.rows) return;  // all threads of a team
  const int count = static_cast<int>(call.problem.dim) / size;
  const int step = Row::size();
  RawChunk<T> x_rmem[chunks];  // x, or x + residual rounded to T, as `sum` has it
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int at = Row::thread() + c * step;
    if (at < count) x_rmem[c].load(row_of<T>(call.x, m) + at * size);
  }
  if (call.residual.data != nullptr) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const int at = Row::thread() + c * step;
      if (at >= count) continue;
      float x[size], residual[size];
      x_rmem[c].spread(x);
      load_chunk(residual, row_of<T>(call.residual, m) + at * size);
#pragma unroll
      for (int n = 0; n < size; ++n) x[n] += residual[n];
      store_chunk(reinterpret_cast<T*>(&x_rmem[c].bytes), x);
    }
  }
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int at = Row::thread() + c * step;
    if (at < count && call.sum.data != nullptr) {
      *reinterpret_cast<uint4*>(row_of<T>(call.sum, m) + at * size) = x_rmem[c].bytes;
    }
  }
  const auto dim = static_cast<float>(call.problem.dim);
  // The sum of f(x) over the row.
  const auto sum_of = [&](int buffer, const auto& f) {
    float sum[1] = {0};
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      if (Row::thread() + c * step >= count) continue;
      float x[size];
      x_rmem[c].spread(x);
#pragma unroll
      for (int n = 0; n < size; ++n) sum[0] += f(x[n]);
    }
    Row::sum(sum, buffer);
    return sum[0];
  };
  float mean = 0;
  if constexpr (norm == Norm::layer) mean = sum_of(0, [](float x) { return x; }) / dim;
  const float squares = sum_of(1, [&](float x) { return (x - mean) * (x - mean); });
  const float rstd = 1.0f / sqrtf(squares / dim + static_cast<float>(call.epsilon));
  if (Row::thread() == 0) {
    store_statistic(call.mean, m, mean);
    store_statistic(call.rstd, m, rstd);
  }
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int at = Row::thread() + c * step;
    if (at >= count) continue;
    float y[size], parameter[size];
    x_rmem[c].spread(y);
#pragma unroll
    for (int n = 0; n < size; ++n) y[n] = (y[n] - mean) * rstd;
    if (call.weight.data != nullptr) {
      load_vector_chunk<T>(parameter, call.weight, at * size);
#pragma unroll
      for (int n = 0; n < size; ++n) y[n] *= parameter[n];
    }
    if (norm == Norm::layer && call.bias.data != nullptr) {
      load_vector_chunk<T>(parameter, call.bias, at * size);
#pragma unroll
      for (int n = 0; n < size; ++n) y[n] += parameter[n];
    }
    store_chunk(row_of<T>(call.y, m) + at * size, y);
  }
}

/// Each CTA has one row and reads it again for each pass, element by element.
template <typename T, Norm norm>
__global__ void __launch_bounds__(256) elements_kernel(const __grid_constant__ NormCall call) {
  using Row = Team<false>;
  wait_for_previous_kernel();  // it may write the inputs
  const std::int64_t m = blockIdx.x;
  const std::int64_t dim = call.problem.dim;
  const auto summed = [&](std::int64_t d) {
    const float x = widen(row_of<T>(call.x, m)[d]);
    if (call.residual.data == nullptr) return x;
    return widen(narrow<T>(x + widen(row_of<T>(call.residual, m)[d])));
  };
  float mean = 0;
  if constexpr (norm == Norm::layer) {
    float sum[1] = {0};
    for (std::int64_t d = threadIdx.x; d < dim; d += blockDim.x) sum[0] += summed(d);
    Row::sum(sum, 0);
    mean = sum[0] / static_cast<float>(dim);
  }
  float squares[1] = {0};
  for (std::int64_t d = threadIdx.x; d < dim; d += blockDim.x) {
    squares[0] += (summed(d) - mean) * (summed(d) - mean);
  }
  Row::sum(squares, 1);
  const float rstd = 1.0f / sqrtf(squares[0] / static_cast<float>(dim) + static_cast<float>(call.epsilon));
  if (threadIdx.x == 0) {
    store_statistic(call.mean, m, mean);
    store_statistic(call.rstd, m, rstd);
  }
  for (std::int64_t d = threadIdx.x; d < dim; d += blockDim.x) {
    const float x = summed(d);
    float y = (x - mean) * rstd;
    if (call.weight.data != nullptr) y *= bias_at<T>(call.weight, d);
    if (norm == Norm::layer && call.bias.data != nullptr) y += bias_at<T>(call.bias, d);
    row_of<T>(call.y, m)[d] = narrow<T>(y);
    if (call.sum.data != nullptr) row_of<T>(call.sum, m)[d] = narrow<T>(x);
  }
}

}  // namespace

void forward(const NormCall& call, const Context& context) {
  RowShape shape = shape_of(call);
  if (call.problem.norm == Norm::layer && shape.vectorized && !shape.one_warp) {
    // A layer norm has more work between reading and writing: fewer threads, each with more loads in flight.
    const auto count =
        static_cast<int>(call.problem.dim * static_cast<std::int64_t>(size_of(call.problem.dtype)) / 16);
    shape.chunks = 4;
    shape.threads = ((count + 3) / 4 + 31) / 32 * 32;
  }
  const Launch how{.name = "tilewise norm forward",
                   .blocks = (call.problem.rows + shape.rows - 1) / shape.rows,
                   .threads = shape.threads,
                   .stream = static_cast<cudaStream_t>(context.stream),
                   .early = has_pdl(call.problem.device)};
  with_types(call.problem, [&]<typename T, Norm norm>() {
    if (!shape.vectorized) return launch<elements_kernel<T, norm>>(how, call);
    with_shape(shape, [&]<int chunks, bool one_warp>() {
      launch<chunks_kernel<T, norm, chunks, one_warp>>(how, call);
    });
  });
}

}  // namespace tilewise::cuda::norm
