#include <algorithm>

#include "core/arena.h"
#include "cuda/norm/config.h"
#include "cuda/norm/dispatch.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/simt/column_sums.h"
#include "cuda/tile/bias.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::norm {
namespace {

// With n = (x − mean)·rstd and g = dy·weight: dx = rstd·(g − mean(g) − n·mean(g·n)), without mean(g) in an
// rms norm. The gradients of weight and bias, Σ dy·n and Σ dy over rows, are summed by each block over its
// rows, and then over blocks.

template <typename T>
__device__ __forceinline__ T* row_of(const Matrix& matrix, std::int64_t m) {
  return reinterpret_cast<T*>(matrix.data) + m * matrix.stride_row;
}

__device__ __forceinline__ float statistic(const Vector& from, std::int64_t m) {
  return from.data == nullptr ? 0.0f : reinterpret_cast<const float*>(from.data)[m * from.stride];
}

/// Where blocks leave their sums: [blocks, dim] each, null where a gradient is not wanted.
struct Partials {
  float* weight = nullptr;
  float* bias = nullptr;
};

/// Rows of x and dy of one thread, as they come from memory: the next row's are loaded ahead.
template <typename T, int chunks, bool one_warp>
struct Ahead {
  RawChunk<T> x[chunks], dy[chunks];

  __device__ __forceinline__ void load(const NormCall& call, std::int64_t m, int count) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const int at = Team<one_warp>::thread() + c * Team<one_warp>::size();
      if (at >= count) continue;
      x[c].load(row_of<T>(call.x, m) + at * chunk_size<T>);
      dy[c].load(row_of<T>(call.dy, m) + at * chunk_size<T>);
    }
  }
};

/// Each warp's sums of a column, one warp after another, to the block's.
template <typename T, int chunks, bool one_warp>
__device__ __forceinline__ void leave_partials(const float (&sums)[chunks][chunk_size<T>], float* to,
                                               int count) {
  constexpr int size = chunk_size<T>;
  using Row = Team<one_warp>;
  if (to == nullptr) return;
  to += static_cast<std::int64_t>(blockIdx.x) * count * size;
  for (int team = 0; team < Row::per_block(); ++team) {
    if (!one_warp || static_cast<int>(threadIdx.x) / 32 == team) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        const int at = Row::thread() + c * Row::size();
        if (at >= count) continue;
#pragma unroll
        for (int n = 0; n < size; ++n) {
          float* place = to + at * size + n;
          *place = sums[c][n] + (team == 0 ? 0.0f : *place);
        }
      }
    }
    __syncthreads();  // this warp's are in
  }
}

template <typename T, Norm norm, int chunks, bool one_warp>
__global__ void __launch_bounds__(most_threads<chunks, one_warp>)
    chunks_kernel(const __grid_constant__ NormCall call, const __grid_constant__ Partials partials) {
  constexpr int size = chunk_size<T>;
  using Row = Team<one_warp>;
  const int count = static_cast<int>(call.problem.dim) / size;
  const auto inverse = 1.0f / static_cast<float>(call.problem.dim);
  float d_weight[chunks][size] = {}, d_bias[chunks][size] = {};
  Ahead<T, chunks, one_warp> ahead;
  if (Row::number() < call.problem.rows) ahead.load(call, Row::number(), count);
#pragma unroll 1
  for (std::int64_t m = Row::number(); m < call.problem.rows; m += Row::count()) {
    const Ahead<T, chunks, one_warp> now = ahead;
    if (m + Row::count() < call.problem.rows) ahead.load(call, m + Row::count(), count);
    const float mean = norm == Norm::layer ? statistic(call.mean, m) : 0.0f;
    const float rstd = statistic(call.rstd, m);
    float normal[chunks][size], g[chunks][size];
    float sums[2] = {0, 0};  // of g·n and of g
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const int at = Row::thread() + c * Row::size();
      if (at >= count) continue;
      now.x[c].spread(normal[c]);
      now.dy[c].spread(g[c]);
      float weight[size];
      if (call.weight.data != nullptr) load_vector_chunk<T>(weight, call.weight, at * size);
#pragma unroll
      for (int n = 0; n < size; ++n) {
        normal[c][n] = (normal[c][n] - mean) * rstd;
        d_weight[c][n] += g[c][n] * normal[c][n];
        if constexpr (norm == Norm::layer) d_bias[c][n] += g[c][n];
        if (call.weight.data != nullptr) g[c][n] *= weight[n];
        sums[0] += g[c][n] * normal[c][n];
        sums[1] += g[c][n];
      }
    }
    if (call.dx.data == nullptr) continue;
    Row::sum(sums);
    const float shift = norm == Norm::layer ? sums[1] * inverse : 0.0f;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const int at = Row::thread() + c * Row::size();
      if (at >= count) continue;
      float more[size] = {};
      if (call.d_sum.data != nullptr) load_chunk(more, row_of<T>(call.d_sum, m) + at * size);
#pragma unroll
      for (int n = 0; n < size; ++n) {
        g[c][n] = rstd * (g[c][n] - shift - normal[c][n] * (sums[0] * inverse)) + more[n];
      }
      store_chunk(row_of<T>(call.dx, m) + at * size, g[c]);
    }
  }
  leave_partials<T, chunks, one_warp>(d_weight, partials.weight, count);
  if constexpr (norm == Norm::layer) leave_partials<T, chunks, one_warp>(d_bias, partials.bias, count);
}

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
  Row::sum(sums);
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

// How many pieces rows are summed in: blocks that stay, or strips.
int pieces_of(const NormCall& call, const RowShape& shape, int multiprocessors) {
  const NormProblem& problem = call.problem;
  if (!shape.in_chunks) return row_strips(problem.rows, problem.dim, multiprocessors);
  const int blocks_each = std::max(1, 1024 / shape.threads);
  return static_cast<int>(std::clamp<std::int64_t>((problem.rows + shape.rows - 1) / shape.rows, 1,
                                                   std::int64_t{multiprocessors} * blocks_each));
}

Partials take_partials(Arena& arena, const NormCall& call, int pieces) {
  const std::int64_t count = pieces * call.problem.dim;
  Partials partials;
  if (call.d_weight.data != nullptr) partials.weight = arena.take<float>(count);
  if (call.d_bias.data != nullptr) partials.bias = arena.take<float>(count);
  return partials;
}

}  // namespace

std::size_t backward_workspace(const NormCall& call, const Context& context) {
  Arena arena(nullptr);
  take_partials(arena, call,
                pieces_of(call, shape_of(call), device_properties(context.device.index).multiprocessors));
  return arena.used();
}

void backward(const NormCall& call, const Context& context) {
  const NormProblem& problem = call.problem;
  const RowShape shape = shape_of(call);
  const int pieces = pieces_of(call, shape, device_properties(context.device.index).multiprocessors);
  Arena arena(context.workspace.data);
  const Partials partials = take_partials(arena, call, pieces);
  const bool sums = call.d_weight.data != nullptr || call.d_bias.data != nullptr;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  with_types(problem, [&]<typename T, Norm norm>() {
    if (shape.in_chunks) {
      const Launch how{
          .name = "tilewise norm backward", .blocks = pieces, .threads = shape.threads, .stream = stream};
      return with_shape(shape, [&]<int chunks, bool one_warp>() {
        launch<chunks_kernel<T, norm, chunks, one_warp>>(how, call, partials);
      });
    }
    // Sums come first: dx may stand where dy does.
    const std::int64_t column_blocks = (problem.dim + 255) / 256;
    if (sums) {
      launch<columns_kernel<T, norm>>({.name = "tilewise norm backward, weights",
                                       .blocks = column_blocks * pieces,
                                       .threads = 256,
                                       .stream = stream},
                                      call, partials, pieces, static_cast<int>(column_blocks));
    }
    if (call.dx.data != nullptr) {
      launch<elements_kernel<T, norm>>(
          {.name = "tilewise norm backward", .blocks = problem.rows, .threads = 256, .stream = stream}, call);
    }
  });
  if (partials.weight != nullptr) sum_partials(partials.weight, pieces, problem.dim, call.d_weight, context);
  if (partials.bias != nullptr) sum_partials(partials.bias, pieces, problem.dim, call.d_bias, context);
}

}  // namespace tilewise::cuda::norm
