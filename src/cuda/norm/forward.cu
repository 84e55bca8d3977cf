#include "cuda/norm/config.h"
#include "cuda/norm/dispatch.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/bias.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::norm {
namespace {

template <typename T>
__device__ __forceinline__ T* row_of(const Matrix& matrix, std::int64_t m) {
  return reinterpret_cast<T*>(matrix.data) + m * matrix.stride_row;
}

__device__ __forceinline__ void store_statistic(const Vector& to, std::int64_t m, float value) {
  if (to.data != nullptr) reinterpret_cast<float*>(to.data)[m * to.stride] = value;
}

/// Mean and sum of squares about it.
struct Moments {
  float mean, squares;
};

/// Those of a thread's chunks.
template <typename T, int chunks>
__device__ __forceinline__ Moments moments_of_thread(const RawChunk<T> (&s)[chunks]) {
  constexpr int size = chunk_size<T>;
  float sum = 0;
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    float x[size];
    s[c].spread(x);
#pragma unroll
    for (int n = 0; n < size; ++n) sum += x[n];
  }
  Moments own{sum / static_cast<float>(chunks * size), 0};
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    float x[size];
    s[c].spread(x);
#pragma unroll
    for (int n = 0; n < size; ++n) own.squares += (x[n] - own.mean) * (x[n] - own.mean);
  }
  return own;
}

/// Those of a block's row of which every thread has equally much. Each thread finds its own, about its own
/// mean, and two of equal weight are put together at a time: one way through the warp, where sums first and
/// squares about their mean then would be two.
template <typename T, int chunks>
__device__ __forceinline__ Moments moments_of_equals(const RawChunk<T> (&s)[chunks]) {
  constexpr int elements = chunks * chunk_size<T>;
  Moments own = moments_of_thread(s);
  float half = 0.5f * elements;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2, half *= 2) {
    const float mean = __shfl_xor_sync(~0u, own.mean, distance);
    const float apart = mean - own.mean;
    own.squares += __shfl_xor_sync(~0u, own.squares, distance) + apart * apart * half;
    own.mean = 0.5f * (own.mean + mean);
  }
  __shared__ Moments of_warps[32];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();  // all warps' are there
  const int warps = static_cast<int>(blockDim.x) / 32;
  Moments all{0, 0};
#pragma unroll 4
  for (int warp = 0; warp < warps; ++warp) all.mean += of_warps[warp].mean;
  all.mean /= static_cast<float>(warps);
#pragma unroll 4
  for (int warp = 0; warp < warps; ++warp) {
    const Moments part = of_warps[warp];
    all.squares += part.squares + 32 * elements * (part.mean - all.mean) * (part.mean - all.mean);
  }
  return all;
}

/// Those of a team's row, `count` chunks of which the thread has some. Each warp finds its own, and about its
/// own mean, so that the team waits once; then they are put together.
template <bool one_warp, typename T, int chunks>
__device__ __forceinline__ Moments moments_of(const RawChunk<T> (&s)[chunks], int count) {
  constexpr int size = chunk_size<T>;
  using Row = Team<one_warp>;
  const int step = Row::size(), lane = static_cast<int>(threadIdx.x) % 32;
  float sum = 0;
  int elements = 0;  // the warp's
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int at = Row::thread() + c * step;
    elements += min(max(count - (at - lane), 0), 32) * size;
    if (at >= count) continue;
    float x[size];
    s[c].spread(x);
#pragma unroll
    for (int n = 0; n < size; ++n) sum += x[n];
  }
  Moments own{warp_sum(sum) / static_cast<float>(max(elements, 1)), 0};
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    if (Row::thread() + c * step >= count) continue;
    float x[size];
    s[c].spread(x);
#pragma unroll
    for (int n = 0; n < size; ++n) own.squares += (x[n] - own.mean) * (x[n] - own.mean);
  }
  own.squares = warp_sum(own.squares);
  if constexpr (one_warp) {
    return own;
  } else {
    __shared__ Moments of_warps[32];
    __shared__ float elements_of[32];
    if (lane == 0) {
      of_warps[threadIdx.x / 32] = own;
      elements_of[threadIdx.x / 32] = static_cast<float>(elements);
    }
    __syncthreads();  // all warps' are there
    const bool there = lane < static_cast<int>(blockDim.x) / 32;
    const Moments part = there ? of_warps[lane] : Moments{0, 0};
    const float weight = there ? elements_of[lane] : 0.0f;
    const float mean = warp_sum(weight * part.mean) / static_cast<float>(count * size);
    return {mean, warp_sum(part.squares + weight * (part.mean - mean) * (part.mean - mean))};
  }
}

/// Of few rows.
constexpr unsigned few_blocks = 64;

/// A row a team, kept in registers between what is read and what is written; `equal` where all threads
/// of a block have equally much of it.
template <typename T, Norm norm, int chunks, bool one_warp, bool equal>
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
  Moments moments{0, 0};
  if constexpr (norm == Norm::layer) {
    if constexpr (equal) {
      moments = moments_of_equals(s);
    } else {
      moments = moments_of<one_warp>(s, count);
    }
  } else {
    float squares[1] = {0};
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      if (Row::thread() + c * step >= count) continue;
      float x[size];
      s[c].spread(x);
#pragma unroll
      for (int n = 0; n < size; ++n) squares[0] += x[n] * x[n];
    }
    Row::sum(squares, 0);
    moments.squares = squares[0];
  }
  const float mean = moments.mean;
  const auto dim = static_cast<float>(call.problem.dim);
  const float rstd = 1.0f / sqrtf(moments.squares / dim + static_cast<float>(call.epsilon));
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
  const auto count =
      static_cast<int>(call.problem.dim * static_cast<std::int64_t>(size_of(call.problem.dtype)) / 16);
  if (call.problem.norm == Norm::layer && shape.in_chunks && !shape.one_warp) {
    // Layer norms have more to do between reading and writing: more to read ahead, in fewer threads.
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
      if constexpr (norm == Norm::layer && !one_warp) {
        if (count == chunks * shape.threads) {
          return launch<chunks_kernel<T, norm, chunks, one_warp, true>>(how, call);
        }
      }
      launch<chunks_kernel<T, norm, chunks, one_warp, false>>(how, call);
    });
  });
}

}  // namespace tilewise::cuda::norm
