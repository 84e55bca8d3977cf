#pragma once

#include "cuda/norm/common/backward_partials.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
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

/// Rows of x and dy that are on their way into shared memory, some ahead. A thread copies what it will read
/// itself, so nobody has to be waited for.
template <typename T, int chunks, bool one_warp, int stages>
struct RowsAhead {
  uint4* slots_smem;  ///< [stages][2 chunks][threads]

  __device__ __forceinline__ uint4* slot(int stage, int which, int c) const {
    return slots_smem + ((stage * 2 + which) * chunks + c) * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ void fetch(const NormCall& call, std::int64_t m, int stage, int count) const {
    if (m < call.problem.rows) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        const int at = Team<one_warp>::thread() + c * Team<one_warp>::size();
        if (at >= count) continue;
        copy_async_16(slot(stage, 0, c), row_of<T>(call.x, m) + at * chunk_size<T>, true);
        copy_async_16(slot(stage, 1, c), row_of<T>(call.dy, m) + at * chunk_size<T>, true);
      }
    }
    commit_copies();  // a group each time, so that they can be counted
  }
  __device__ __forceinline__ void get(float (&to)[chunk_size<T>], int stage, int which, int c) const {
    const RawChunk<T> raw{*slot(stage, which, c)};
    raw.spread(to);
  }
};

/// Threads that a multiprocessor has at a time, each with eight columns of a row: so there are registers for
/// the sums of columns and for a row between its two passes.
constexpr int resident_threads = 1024;
constexpr int columns_held = 8;

template <typename T, Norm norm, int chunks, bool one_warp, int stages>
__global__ void __launch_bounds__(resident_threads)
    chunks_kernel(const __grid_constant__ NormCall call, const __grid_constant__ Partials partials) {
  constexpr int size = chunk_size<T>;
  constexpr bool held = chunks * size <= columns_held;  // longer rows are read again in shared memory
  using Row = Team<one_warp>;
  const int count = static_cast<int>(call.problem.dim) / size;
  const auto inverse = 1.0f / static_cast<float>(call.problem.dim);
  float d_weight[chunks][size] = {}, d_bias[chunks][size] = {};
  TILEWISE_DYNAMIC_SHARED(uint4, slots_smem, 16);
  const RowsAhead<T, chunks, one_warp, stages> ahead{slots_smem};
#pragma unroll
  for (int stage = 0; stage < stages - 1; ++stage) {
    ahead.fetch(call, Row::number() + stage * Row::count(), stage, count);
  }
  const auto statistics = [&](std::int64_t m) {
    if (m >= call.problem.rows) return float2{};
    return float2{norm == Norm::layer ? statistic(call.mean, m) : 0.0f, statistic(call.rstd, m)};
  };
  float2 next = statistics(Row::number());
  int stage = 0, place = 0;
#pragma unroll 1
  for (std::int64_t m = Row::number(); m < call.problem.rows; m += Row::count()) {
    ahead.fetch(call, m + (stages - 1) * Row::count(), (stage + stages - 1) % stages, count);
    const auto [mean, rstd] = next;
    next = statistics(m + Row::count());  // a row ahead, too
    wait_copies<stages - 1>();            // for this row
    float normal[held ? chunks : 1][size], g[held ? chunks : 1][size];
    // n and g of a chunk; the first time with the sums over rows.
    const auto get = [&](int c, int at, bool first) {
      float(&n)[size] = normal[held ? c : 0], (&own)[size] = g[held ? c : 0];
      ahead.get(n, stage, 0, c);
      ahead.get(own, stage, 1, c);
#pragma unroll
      for (int e = 0; e < size; ++e) {
        n[e] = (n[e] - mean) * rstd;
        if (!first) continue;
        d_weight[c][e] += own[e] * n[e];
        if constexpr (norm == Norm::layer) d_bias[c][e] += own[e];
      }
      if (call.weight.data == nullptr) return;
      float weight[size];
      load_vector_chunk<T>(weight, call.weight, at * size);
#pragma unroll
      for (int e = 0; e < size; ++e) own[e] *= weight[e];
    };
    float sums[norm == Norm::layer ? 2 : 1] = {};  // of g·n and of g
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const int at = Row::thread() + c * Row::size();
      if (at >= count) continue;
      get(c, at, true);
#pragma unroll
      for (int e = 0; e < size; ++e) {
        sums[0] += g[held ? c : 0][e] * normal[held ? c : 0][e];
        if constexpr (norm == Norm::layer) sums[1] += g[held ? c : 0][e];
      }
    }
    if (call.dx.data != nullptr) {
      RawChunk<T> more[chunks];  // on its way while sums are joined
      if (call.d_sum.data != nullptr) {
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          const int at = Row::thread() + c * Row::size();
          if (at < count) more[c].load(row_of<T>(call.d_sum, m) + at * size);
        }
      }
      Row::sum(sums, place);
      place ^= 1;
      // dx = rstd·g − n·slope − shift
      const float slope = rstd * sums[0] * inverse;
      float shift = 0;
      if constexpr (norm == Norm::layer) shift = rstd * sums[1] * inverse;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        const int at = Row::thread() + c * Row::size();
        if (at >= count) continue;
        if constexpr (!held) get(c, at, false);
        float dx[size];
#pragma unroll
        for (int e = 0; e < size; ++e) {
          dx[e] = rstd * g[held ? c : 0][e] - shift - normal[held ? c : 0][e] * slope;
        }
        if (call.d_sum.data != nullptr) {
          float added[size];
          more[c].spread(added);
#pragma unroll
          for (int e = 0; e < size; ++e) dx[e] += added[e];
        }
        store_chunk(row_of<T>(call.dx, m) + at * size, dx);
      }
    }
    stage = (stage + 1) % stages;
  }
  leave_partials<T, chunks, one_warp>(d_weight, partials.weight, count);
  if constexpr (norm == Norm::layer) leave_partials<T, chunks, one_warp>(d_bias, partials.bias, count);
}

}  // namespace tilewise::cuda::norm
