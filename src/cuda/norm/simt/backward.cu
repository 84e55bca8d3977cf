#include "cuda/norm/common/backward_partials.cuh"
#include "cuda/norm/common/backward_passes.cuh"
#include "cuda/norm/common/config.h"
#include "cuda/norm/common/dispatch.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/bias.cuh"
#include "cuda/tile/column_sums.h"

namespace tilewise::cuda::norm {

/// Rows of x and dy that are copied asynchronously into shared memory. A thread copies what it reads itself,
/// so no barrier is needed.
template <typename T>
struct AsyncRows {
  static constexpr int stage_slots = 2 * pipelined_chunks * 32;  // of a warp, 16 bytes each
  static constexpr int size = chunk_size<T>;

  uint4* lane_smem;  ///< the lane's slots of the warp's [stages][x, dy][chunks][32]
  const T *x_gmem, *dy_gmem;
  std::int64_t x_step, dy_step;  ///< from one row of the CTA to the next
  int chunk_stride;              ///< elements from a thread's first chunk to its second

  __device__ AsyncRows(const NormCall& call, uint4* slots_smem)
      : lane_smem(slots_smem + threadIdx.x / 32 * (pipelined_stages * stage_slots) + threadIdx.x % 32),
        x_gmem(row_of<T>(call.x, blockIdx.x) + threadIdx.x * size),
        dy_gmem(row_of<T>(call.dy, blockIdx.x) + threadIdx.x * size),
        x_step(gridDim.x * call.x.stride_row),
        dy_step(gridDim.x * call.dy.stride_row),
        chunk_stride(static_cast<int>(blockDim.x) * size) {}

  __device__ __forceinline__ uint4* slot(int stage, int which, int c) const {
    return lane_smem + stage * stage_slots + (which * pipelined_chunks + c) * 32;
  }
  /// Starts to copy the next row.
  __device__ __forceinline__ void fetch(int stage, const bool (&inside)[pipelined_chunks]) {
#pragma unroll
    for (int c = 0; c < pipelined_chunks; ++c) {
      if (!inside[c]) continue;
      copy_async_16(slot(stage, 0, c), x_gmem + c * chunk_stride, true);
      copy_async_16(slot(stage, 1, c), dy_gmem + c * chunk_stride, true);
    }
    x_gmem += x_step;
    dy_gmem += dy_step;
  }
  __device__ __forceinline__ RawChunk<T> x(int stage, int c) const { return {*slot(stage, 0, c)}; }
  __device__ __forceinline__ RawChunk<T> dy(int stage, int c) const { return {*slot(stage, 1, c)}; }
};

/// Mean and rstd of a CTA's rows, 32 rows at a time, one per lane. When they were loaded row by row, warps
/// waited for each load at once, because the compiler moves a value that all lanes share into a uniform
/// register.
struct PrefetchedStatistics {
  float2 current{}, next{};  ///< of 32 rows, and of the 32 after them

  __device__ __forceinline__ void load(const NormCall& call, int first) {
    current = next;
    const std::int64_t m = blockIdx.x + std::int64_t{gridDim.x} * (first + threadIdx.x % 32);
    if (m < call.problem.rows) next = {statistic(call.mean, m), statistic(call.rstd, m)};
  }
  __device__ __forceinline__ float2 at(int n) const {
    return {__shfl_sync(~0u, current.x, n % 32), __shfl_sync(~0u, current.y, n % 32)};
  }
};

/// Backward of long rows of any length (backward_passes.cuh). Each thread copies its own chunks.
template <typename T, Norm norm>
__global__ void __launch_bounds__(pipelined_threads)
    pipelined_kernel(const __grid_constant__ NormCall call, const __grid_constant__ Partials partials) {
  constexpr int size = chunk_size<T>, chunks = pipelined_chunks, stages = pipelined_stages,
                ahead = stages - 2;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32;
  const int count = static_cast<int>(call.problem.dim) / size;
  const auto inverse_dim = 1.0f / static_cast<float>(call.problem.dim);
  const bool inside[chunks] = {thread < count, thread + threads < count};
  OwnColumns<T, norm> columns;
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
#pragma unroll
    for (int e = 0; e < size; ++e) columns.weight[c][e] = 1;
    if (inside[c] && call.weight.data != nullptr) {
      load_vector_chunk<T>(columns.weight[c], call.weight, (thread + c * threads) * size);
    }
  }
  TILEWISE_DYNAMIC_SHARED(uint4, slots_smem, 16);
  // The warps' sums of a row, alternating between rows: of g·x̂ for up to 16 warps, then of g.
  __shared__ float warp_sums[2][32];
  AsyncRows<T> rows(call, slots_smem);
  // There are no more CTAs than rows.
  const auto total = static_cast<int>((call.problem.rows - blockIdx.x + gridDim.x - 1) / gridDim.x);
#pragma unroll
  for (int stage = 0; stage < ahead; ++stage) {
    if (stage < total) rows.fetch(stage, inside);
    commit_copies();  // also without copies, because wait_copies counts groups
  }
  PrefetchedStatistics statistics;
  statistics.load(call, 0);
  T* dx_gmem = call.dx.data == nullptr ? nullptr : row_of<T>(call.dx, blockIdx.x) + thread * size;
  const T* d_sum_gmem =
      call.d_sum.data == nullptr ? nullptr : row_of<T>(call.d_sum, blockIdx.x) + thread * size;
  const std::int64_t dx_step = gridDim.x * call.dx.stride_row, d_sum_step = gridDim.x * call.d_sum.stride_row;
  float2 row_before{};
  int stage = 0;
#pragma unroll 1
  for (int n = 0; n <= total; ++n) {  // the first pass of row n, and the second of row n - 1
    if (n + ahead < total) rows.fetch((stage + ahead) % stages, inside);
    commit_copies();
    const bool second = n > 0 && dx_gmem != nullptr;
    RawChunk<T> d_sum[chunks];
    if (second && d_sum_gmem != nullptr) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (inside[c]) d_sum[c].load(d_sum_gmem + c * rows.chunk_stride);
      }
      d_sum_gmem += d_sum_step;
    }
    if (n % 32 == 0) statistics.load(call, n + 32);
    const float2 row = statistics.at(n);
    wait_copies<ahead>();  // this row has arrived
    if (n < total) {
      float sum_gx = 0, sum_g = 0;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (inside[c]) columns.first_pass(c, rows.x(stage, c), rows.dy(stage, c), row, sum_gx, sum_g);
      }
      const float sum = sum_halves(sum_gx, sum_g);
      if (lane % 16 == 0) warp_sums[n % 2][warp + lane] = sum;
    }
    if (second) {
      const float row_sum = lane % 16 < threads / 32 ? warp_sums[(n - 1) % 2][lane] : 0.0f;
      const Correction<norm> correction(row_before, row_sum, inverse_dim);
      const int stage_before = (stage + stages - 1) % stages;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (!inside[c]) continue;
        float dx[size];
        columns.second_pass(dx, c, rows.x(stage_before, c), rows.dy(stage_before, c), correction);
        if (d_sum_gmem != nullptr) add_chunk(dx, d_sum[c]);
        store_chunk(dx_gmem + c * rows.chunk_stride, dx);
      }
      dx_gmem += dx_step;
    }
    __syncthreads();  // all warps have stored this row's sums, and read those of the row before
    row_before = row;
    stage = (stage + 1) % stages;
  }
  columns.store(partials, count);
}

// Rows that are not aligned to chunks of 16 bytes, or that exceed shared memory.

/// dx: each CTA has one row, element by element.
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
  const auto x_hat_of = [&](std::int64_t d) { return (widen(row_of<T>(call.x, m)[d]) - mean) * rstd; };
  float row_sums[2] = {0, 0};
  for (std::int64_t d = threadIdx.x; d < dim; d += blockDim.x) {
    row_sums[0] += g_of(d) * x_hat_of(d);
    row_sums[1] += g_of(d);
  }
  Row::sum(row_sums, 0);
  const float inverse_dim = 1.0f / static_cast<float>(dim);
  const float shift = norm == Norm::layer ? row_sums[1] * inverse_dim : 0.0f;
  for (std::int64_t d = threadIdx.x; d < dim; d += blockDim.x) {
    float dx = rstd * (g_of(d) - shift - x_hat_of(d) * (row_sums[0] * inverse_dim));
    if (call.d_sum.data != nullptr) dx += widen(row_of<T>(call.d_sum, m)[d]);
    row_of<T>(call.dx, m)[d] = narrow<T>(dx);
  }
}

/// The gradients of weight and bias, summed over a strip of rows: each thread has one column.
template <typename T, Norm norm>
__global__ void __launch_bounds__(256)
    columns_kernel(const __grid_constant__ NormCall call, const __grid_constant__ Partials partials,
                   int strips, int column_blocks) {
  const std::int64_t strip = blockIdx.x / column_blocks;
  const std::int64_t d = static_cast<std::int64_t>(blockIdx.x % column_blocks) * blockDim.x + threadIdx.x;
  if (d >= call.problem.dim) return;
  float weight = 0, bias = 0;
  const std::int64_t end = call.problem.rows * (strip + 1) / strips;
  for (std::int64_t m = call.problem.rows * strip / strips; m < end; ++m) {
    const float dy = widen(row_of<T>(call.dy, m)[d]);
    const float mean = norm == Norm::layer ? statistic(call.mean, m) : 0.0f;
    weight += dy * (widen(row_of<T>(call.x, m)[d]) - mean) * statistic(call.rstd, m);
    bias += dy;
  }
  if (partials.weight != nullptr) partials.weight[strip * call.problem.dim + d] = weight;
  if (partials.bias != nullptr) partials.bias[strip * call.problem.dim + d] = bias;
}

/// Rows of x and dy that are copied into shared memory, some rows ahead. A thread copies what it reads
/// itself, so no barrier is needed.
template <typename T, int chunks, bool one_warp, int stages>
struct RowPrefetch {
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
    commit_copies();  // also without copies, because wait_copies counts groups
  }
  __device__ __forceinline__ void get(float (&to)[chunk_size<T>], int stage, int which, int c) const {
    const RawChunk<T> raw{*slot(stage, which, c)};
    raw.spread(to);
  }
};

/// Threads that an SM has at a time, each with eight columns of a row. Then there are registers for the sums
/// over rows and for a row between its two passes.
constexpr int resident_threads = 1024;
constexpr int columns_in_registers = 8;

/// Backward of vectorized rows that pipelined_kernel does not take, such as short ones and f32. A team, a
/// warp or a CTA, has a row at a time.
template <typename T, Norm norm, int chunks, bool one_warp, int stages>
__global__ void __launch_bounds__(resident_threads)
    chunks_kernel(const __grid_constant__ NormCall call, const __grid_constant__ Partials partials) {
  constexpr int size = chunk_size<T>;
  // Whether a row stays in registers. If not, the second pass reads shared memory again.
  constexpr bool keeps_row = chunks * size <= columns_in_registers;
  using Row = Team<one_warp>;
  const int count = static_cast<int>(call.problem.dim) / size;
  const auto inverse_dim = 1.0f / static_cast<float>(call.problem.dim);
  float d_weight[chunks][size] = {}, d_bias[chunks][size] = {};
  TILEWISE_DYNAMIC_SHARED(uint4, slots_smem, 16);
  const RowPrefetch<T, chunks, one_warp, stages> ahead{slots_smem};
#pragma unroll
  for (int stage = 0; stage < stages - 1; ++stage) {
    ahead.fetch(call, Row::number() + stage * Row::count(), stage, count);
  }
  const auto statistics = [&](std::int64_t m) {
    if (m >= call.problem.rows) return float2{};
    return float2{norm == Norm::layer ? statistic(call.mean, m) : 0.0f, statistic(call.rstd, m)};
  };
  float2 next = statistics(Row::number());
  int stage = 0, buffer = 0;
#pragma unroll 1
  for (std::int64_t m = Row::number(); m < call.problem.rows; m += Row::count()) {
    ahead.fetch(call, m + (stages - 1) * Row::count(), (stage + stages - 1) % stages, count);
    const auto [mean, rstd] = next;
    next = statistics(m + Row::count());  // loaded one row ahead
    wait_copies<stages - 1>();            // this row has arrived
    float x_hat[keeps_row ? chunks : 1][size], g[keeps_row ? chunks : 1][size];
    // x̂ and g of a chunk. The first time it also adds to the sums over rows.
    const auto get = [&](int c, int at, bool first) {
      float(&x_hat_chunk)[size] = x_hat[keeps_row ? c : 0], (&g_chunk)[size] = g[keeps_row ? c : 0];
      ahead.get(x_hat_chunk, stage, 0, c);
      ahead.get(g_chunk, stage, 1, c);
#pragma unroll
      for (int e = 0; e < size; ++e) {
        x_hat_chunk[e] = (x_hat_chunk[e] - mean) * rstd;
        if (!first) continue;
        d_weight[c][e] += g_chunk[e] * x_hat_chunk[e];
        if constexpr (norm == Norm::layer) d_bias[c][e] += g_chunk[e];
      }
      if (call.weight.data == nullptr) return;
      float weight[size];
      load_vector_chunk<T>(weight, call.weight, at * size);
#pragma unroll
      for (int e = 0; e < size; ++e) g_chunk[e] *= weight[e];
    };
    float row_sums[norm == Norm::layer ? 2 : 1] = {};  // of g·x̂ and of g
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const int at = Row::thread() + c * Row::size();
      if (at >= count) continue;
      get(c, at, true);
#pragma unroll
      for (int e = 0; e < size; ++e) {
        row_sums[0] += g[keeps_row ? c : 0][e] * x_hat[keeps_row ? c : 0][e];
        if constexpr (norm == Norm::layer) row_sums[1] += g[keeps_row ? c : 0][e];
      }
    }
    if (call.dx.data != nullptr) {
      RawChunk<T> d_sum[chunks];  // in flight while the team adds up its sums
      if (call.d_sum.data != nullptr) {
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          const int at = Row::thread() + c * Row::size();
          if (at < count) d_sum[c].load(row_of<T>(call.d_sum, m) + at * size);
        }
      }
      Row::sum(row_sums, buffer);
      buffer ^= 1;
      // dx = rstd·g − slope·x̂ − shift
      const float slope = rstd * row_sums[0] * inverse_dim;
      float shift = 0;
      if constexpr (norm == Norm::layer) shift = rstd * row_sums[1] * inverse_dim;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        const int at = Row::thread() + c * Row::size();
        if (at >= count) continue;
        if constexpr (!keeps_row) get(c, at, false);
        float dx[size];
#pragma unroll
        for (int e = 0; e < size; ++e) {
          dx[e] = rstd * g[keeps_row ? c : 0][e] - shift - x_hat[keeps_row ? c : 0][e] * slope;
        }
        if (call.d_sum.data != nullptr) {
          float added[size];
          d_sum[c].spread(added);
#pragma unroll
          for (int e = 0; e < size; ++e) dx[e] += added[e];
        }
        store_chunk(row_of<T>(call.dx, m) + at * size, dx);
      }
    }
    stage = (stage + 1) % stages;
  }
  store_partials<T, chunks, one_warp>(d_weight, partials.weight, count);
  if constexpr (norm == Norm::layer) store_partials<T, chunks, one_warp>(d_bias, partials.bias, count);
}

namespace {

// With x̂ = (x − mean)·rstd and g = dy·weight: dx = rstd·(g − mean(g) − x̂·mean(g·x̂)), without mean(g) in an
// RMS norm. The gradients of weight and bias are Σ dy·x̂ and Σ dy over rows. Each CTA sums them over its rows;
// a second kernel adds up the CTAs' sums in a fixed order.

// Bytes of shared memory for `stages` rows of x and dy.
std::size_t stages_bytes(const RowShape& shape, int stages) {
  return static_cast<std::size_t>(stages) * 2 * 16 * static_cast<std::size_t>(shape.chunks * shape.threads);
}

RowShape pipelined_shape(int count) {
  const int threads = ((count + pipelined_chunks - 1) / pipelined_chunks + 31) / 32 * 32;
  return {.vectorized = true, .pipelined = true, .chunks = pipelined_chunks, .threads = threads};
}

// Whether pipelined_kernel takes rows of `count` chunks. On an H200 it takes 0.85 to 0.99 of the time of
// chunks_kernel for RMS norms of 768 to 8192 bf16 elements; layer norms gain more. f16 was not measured.
bool suits_pipelined(const NormCall& call, int count, const DeviceProperties& device) {
  return size_of(call.problem.dtype) == 2 && count >= 96 && count <= pipelined_chunks * pipelined_threads &&
         stages_bytes(pipelined_shape(count), pipelined_stages) <= device.shared_bytes;
}

// Where one row of x and dy exceeds shared memory, rows are read element by element.
RowShape backward_shape(const NormCall& call, const DeviceProperties& device) {
  RowShape shape = shape_of(call);
  if (!shape.vectorized) return shape;
  const auto size = 16 / static_cast<int>(size_of(call.problem.dtype));
  const auto count = static_cast<int>(call.problem.dim) / size, in_registers = columns_in_registers / size;
  if (suits_pipelined(call, count, device)) return pipelined_shape(count);
  shape.one_warp = count <= 32 * in_registers;
  shape.chunks = in_registers;
  if (shape.one_warp) {
    if (count <= 32) shape.chunks = 1;
    shape.threads = 256;
    shape.rows = 8;
  } else {
    while (count > shape.chunks * resident_threads) shape.chunks *= 2;
    shape.threads = ((count + shape.chunks - 1) / shape.chunks + 31) / 32 * 32;
    shape.rows = 1;
  }
  return stages_bytes(shape, 1) <= device.shared_bytes ? shape : RowShape{};
}

// Calls body.operator()<chunks, one_warp>() with one of the shapes that backward_shape returns.
template <typename T, typename Body>
void with_backward_shape(const RowShape& shape, const Body& body) {
  constexpr int in_registers = columns_in_registers / chunk_size<T>;
  if (shape.one_warp) {
    return shape.chunks == 1 ? body.template operator()<1, true>()
                             : body.template operator()<in_registers, true>();
  }
  if (shape.chunks == in_registers) return body.template operator()<in_registers, false>();
  shape.chunks == 2 ? body.template operator()<2, false>() : body.template operator()<4, false>();
}

// How many partial sums of the gradients of weight and bias there are: one for each persistent CTA or strip.
int partial_count_of(const NormCall& call, const RowShape& shape, int multiprocessors) {
  const NormProblem& problem = call.problem;
  if (!shape.vectorized) return row_strips(problem.rows, problem.dim, multiprocessors);
  const int ctas_per_sm = (shape.pipelined ? pipelined_threads : resident_threads) / shape.threads;
  return persistent_ctas((problem.rows + shape.rows - 1) / shape.rows, multiprocessors, ctas_per_sm);
}

}  // namespace

std::size_t backward_workspace(const NormCall& call, const Context& context) {
  Arena arena(nullptr);
  const DeviceProperties& device = device_properties(context.device.index);
  take_partials(arena, call, partial_count_of(call, backward_shape(call, device), device.multiprocessors));
  return arena.used();
}

void backward(const NormCall& call, const Context& context) {
  const NormProblem& problem = call.problem;
  const DeviceProperties& device = device_properties(context.device.index);
  const RowShape shape = backward_shape(call, device);
  const int partial_count = partial_count_of(call, shape, device.multiprocessors);
  Arena arena(context.workspace.data);
  const Partials partials = take_partials(arena, call, partial_count);
  const bool wants_sums = call.d_weight.data != nullptr || call.d_bias.data != nullptr;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  with_types(problem, [&]<typename T, Norm norm>() {
    if (shape.vectorized) {
      Launch how{.name = "tilewise norm backward",
                 .blocks = partial_count,
                 .threads = shape.threads,
                 .stream = stream};
      if constexpr (sizeof(T) == 2) {
        if (shape.pipelined) {
          how.shared_bytes = dynamic_shared_bytes(stages_bytes(shape, pipelined_stages));
          return launch<pipelined_kernel<T, norm>>(how, call, partials);
        }
      }
      return with_backward_shape<T>(shape, [&]<int chunks, bool one_warp>() {
        const auto run = [&]<int stages>() {
          how.shared_bytes = dynamic_shared_bytes(stages_bytes(shape, stages));
          launch<chunks_kernel<T, norm, chunks, one_warp, stages>>(how, call, partials);
        };
        stages_bytes(shape, 3) <= device.shared_bytes ? run.template operator()<3>()
                                                      : run.template operator()<1>();
      });
    }
    // The sums come first, because dx may overwrite dy.
    const std::int64_t column_blocks = (problem.dim + 255) / 256;
    if (wants_sums) {
      launch<columns_kernel<T, norm>>({.name = "tilewise norm backward, weights",
                                       .blocks = column_blocks * partial_count,
                                       .threads = 256,
                                       .stream = stream},
                                      call, partials, partial_count, static_cast<int>(column_blocks));
    }
    if (call.dx.data != nullptr) {
      launch<elements_kernel<T, norm>>(
          {.name = "tilewise norm backward", .blocks = problem.rows, .threads = 256, .stream = stream}, call);
    }
  });
  sum_partials({partials.weight, call.d_weight}, {partials.bias, call.d_bias}, partial_count, problem.dim,
               context);
}

}  // namespace tilewise::cuda::norm
