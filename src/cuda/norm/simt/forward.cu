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

/// Of few rows.
constexpr unsigned few_blocks = 64;

/// A row a team, kept in registers between what is read and what is written.
template <typename T, Norm norm, int chunks, bool one_warp>
__global__ void __launch_bounds__(most_threads<chunks, one_warp>)
    chunks_kernel(const __grid_constant__ NormCall call) {
  constexpr int size = chunk_size<T>;
  using Row = Team<one_warp>;
  // Few rows leave the product behind time to have its first weights come. Under many it is not let begin:
  // gate and up of 4096 tokens took a fifth longer then.
  if (gridDim.x <= few_blocks) let_kernel_behind_begin();
  wait_for_kernel_ahead();
  const std::int64_t m = Row::number();
  if (m >= call.problem.rows) return;  // a whole warp
  const int count = static_cast<int>(call.problem.dim) / size;
  const int step = Row::size();
  RawChunk<T> s[chunks];  // as it will be rounded, so that nothing is lost
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int at = Row::thread() + c * step;
    if (at < count) s[c].load(row_of<T>(call.x, m) + at * size);
  }
  if (call.residual.data != nullptr) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const int at = Row::thread() + c * step;
      if (at >= count) continue;
      float x[size], more[size];
      s[c].spread(x);
      load_chunk(more, row_of<T>(call.residual, m) + at * size);
#pragma unroll
      for (int n = 0; n < size; ++n) x[n] += more[n];
      store_chunk(reinterpret_cast<T*>(&s[c].bytes), x);
    }
  }
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int at = Row::thread() + c * step;
    if (at < count && call.sum.data != nullptr) {
      *reinterpret_cast<uint4*>(row_of<T>(call.sum, m) + at * size) = s[c].bytes;
    }
  }
  const auto dim = static_cast<float>(call.problem.dim);
  // Of f(x) over the row.
  const auto sum_of = [&](int place, const auto& f) {
    float sum[1] = {0};
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      if (Row::thread() + c * step >= count) continue;
      float x[size];
      s[c].spread(x);
#pragma unroll
      for (int n = 0; n < size; ++n) sum[0] += f(x[n]);
    }
    Row::sum(sum, place);
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
    s[c].spread(y);
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

/// A row a block, read anew for each pass, element by element.
template <typename T, Norm norm>
__global__ void __launch_bounds__(256) elements_kernel(const __grid_constant__ NormCall call) {
  using Row = Team<false>;
  wait_for_kernel_ahead();
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
    const float s = summed(d);
    float y = (s - mean) * rstd;
    if (call.weight.data != nullptr) y *= bias_at<T>(call.weight, d);
    if (norm == Norm::layer && call.bias.data != nullptr) y += bias_at<T>(call.bias, d);
    row_of<T>(call.y, m)[d] = narrow<T>(y);
    if (call.sum.data != nullptr) row_of<T>(call.sum, m)[d] = narrow<T>(s);
  }
}

}  // namespace

void forward(const NormCall& call, const Context& context) {
  RowShape shape = shape_of(call);
  if (call.problem.norm == Norm::layer && shape.in_chunks && !shape.one_warp) {
    // Layer norms have more to do between reading and writing: more to read ahead, in fewer threads.
    const auto count =
        static_cast<int>(call.problem.dim * static_cast<std::int64_t>(size_of(call.problem.dtype)) / 16);
    shape.chunks = 4;
    shape.threads = ((count + 3) / 4 + 31) / 32 * 32;
  }
  const Launch how{.name = "tilewise norm forward",
                   .blocks = (call.problem.rows + shape.rows - 1) / shape.rows,
                   .threads = shape.threads,
                   .stream = static_cast<cudaStream_t>(context.stream),
                   .early = begins_early(call.problem.device)};
  with_types(call.problem, [&]<typename T, Norm norm>() {
    if (!shape.in_chunks) return launch<elements_kernel<T, norm>>(how, call);
    with_shape(shape, [&]<int chunks, bool one_warp>() {
      launch<chunks_kernel<T, norm, chunks, one_warp>>(how, call);
    });
  });
}

}  // namespace tilewise::cuda::norm
