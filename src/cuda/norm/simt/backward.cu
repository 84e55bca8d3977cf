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

/// Rows of x and dy on their way into shared memory. A thread copies what it will read itself.
template <typename T>
struct LateRows {
  static constexpr int stage_slots = 2 * late_chunks * 32;  // of a warp
  static constexpr int size = chunk_size<T>;

  uint4* own_smem;  ///< the lane's of [stages][x, dy][chunks][32]
  const T *x_gmem, *dy_gmem;
  std::int64_t x_step, dy_step;  ///< from one row of the block to the next
  int far;                       ///< from a thread's first chunk to its second

  __device__ LateRows(const NormCall& call, uint4* slots_smem)
      : own_smem(slots_smem + threadIdx.x / 32 * (late_stages * stage_slots) + threadIdx.x % 32),
        x_gmem(row_of<T>(call.x, blockIdx.x) + threadIdx.x * size),
        dy_gmem(row_of<T>(call.dy, blockIdx.x) + threadIdx.x * size),
        x_step(gridDim.x * call.x.stride_row),
        dy_step(gridDim.x * call.dy.stride_row),
        far(static_cast<int>(blockDim.x) * size) {}

  __device__ __forceinline__ uint4* slot(int stage, int which, int c) const {
    return own_smem + stage * stage_slots + (which * late_chunks + c) * 32;
  }
  /// Begins to copy the next row.
  __device__ __forceinline__ void fetch(int stage, const bool (&there)[late_chunks]) {
#pragma unroll
    for (int c = 0; c < late_chunks; ++c) {
      if (!there[c]) continue;
      copy_async_16(slot(stage, 0, c), x_gmem + c * far, true);
      copy_async_16(slot(stage, 1, c), dy_gmem + c * far, true);
    }
    x_gmem += x_step;
    dy_gmem += dy_step;
  }
  __device__ __forceinline__ RawChunk<T> x(int stage, int c) const { return {*slot(stage, 0, c)}; }
  __device__ __forceinline__ RawChunk<T> dy(int stage, int c) const { return {*slot(stage, 1, c)}; }
};

/// What is known of a block's rows, 32 of them at a time, a row a lane. Loaded row by row they were waited
/// for at once: the compiler moves what all lanes have alike into a register of the warp's.
struct LateStatistics {
  float2 own{}, next{};  ///< mean and rstd of 32 rows, and of the 32 behind them

  __device__ __forceinline__ void load(const NormCall& call, int first) {
    own = next;
    const std::int64_t m = blockIdx.x + std::int64_t{gridDim.x} * (first + threadIdx.x % 32);
    if (m < call.problem.rows) next = {statistic(call.mean, m), statistic(call.rstd, m)};
  }
  __device__ __forceinline__ float2 at(int n) const {
    return {__shfl_sync(~0u, own.x, n % 32), __shfl_sync(~0u, own.y, n % 32)};
  }
};

/// Long rows of any length, which threads copy for themselves.
template <typename T, Norm norm>
__global__ void __launch_bounds__(late_threads)
    late_kernel(const __grid_constant__ NormCall call, const __grid_constant__ Partials partials) {
  constexpr int size = chunk_size<T>, chunks = late_chunks, stages = late_stages, ahead = stages - 2;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32;
  const int count = static_cast<int>(call.problem.dim) / size;
  const auto inverse = 1.0f / static_cast<float>(call.problem.dim);
  const bool there[chunks] = {thread < count, thread + threads < count};
  OwnColumns<T, norm> columns;
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
#pragma unroll
    for (int e = 0; e < size; ++e) columns.weight[c][e] = 1;
    if (there[c] && call.weight.data != nullptr) {
      load_vector_chunk<T>(columns.weight[c], call.weight, (thread + c * threads) * size);
    }
  }
  TILEWISE_DYNAMIC_SHARED(uint4, slots_smem, 16);
  __shared__ float of_warps[2][32];  // by turns: sums of g·n of up to 16 warps, and of g
  LateRows<T> rows(call, slots_smem);
  // There are no more blocks than rows.
  const auto total = static_cast<int>((call.problem.rows - blockIdx.x + gridDim.x - 1) / gridDim.x);
#pragma unroll
  for (int stage = 0; stage < ahead; ++stage) {
    if (stage < total) rows.fetch(stage, there);
    commit_copies();  // a group each time, so that they can be counted
  }
  LateStatistics statistics;
  statistics.load(call, 0);
  T* dx_gmem = call.dx.data == nullptr ? nullptr : row_of<T>(call.dx, blockIdx.x) + thread * size;
  const T* more_gmem =
      call.d_sum.data == nullptr ? nullptr : row_of<T>(call.d_sum, blockIdx.x) + thread * size;
  const std::int64_t dx_step = gridDim.x * call.dx.stride_row, more_step = gridDim.x * call.d_sum.stride_row;
  float2 before{};
  int stage = 0;
#pragma unroll 1
  for (int n = 0; n <= total; ++n) {  // row n has its first pass, and row n - 1 its second
    if (n + ahead < total) rows.fetch((stage + ahead) % stages, there);
    commit_copies();
    const bool second = n > 0 && dx_gmem != nullptr;
    RawChunk<T> more[chunks];
    if (second && more_gmem != nullptr) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (there[c]) more[c].load(more_gmem + c * rows.far);
      }
      more_gmem += more_step;
    }
    if (n % 32 == 0) statistics.load(call, n + 32);
    const float2 own = statistics.at(n);
    wait_copies<ahead>();  // for this row
    if (n < total) {
      float sum_gn = 0, sum_g = 0;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (there[c]) columns.first_pass(c, rows.x(stage, c), rows.dy(stage, c), own, sum_gn, sum_g);
      }
      const float sum = sum_halves(sum_gn, sum_g);
      if (lane % 16 == 0) of_warps[n % 2][warp + lane] = sum;
    }
    if (second) {
      const float left = lane % 16 < threads / 32 ? of_warps[(n - 1) % 2][lane] : 0.0f;
      const Correction<norm> correction(before, left, inverse);
      const int last = (stage + stages - 1) % stages;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (!there[c]) continue;
        float dx[size];
        columns.second_pass(dx, c, rows.x(last, c), rows.dy(last, c), correction);
        if (more_gmem != nullptr) add_chunk(dx, more[c]);
        store_chunk(dx_gmem + c * rows.far, dx);
      }
      dx_gmem += dx_step;
    }
    __syncthreads();  // this row's sums are there, the last one's were read
    before = own;
    stage = (stage + 1) % stages;
  }
  columns.leave(partials, count);
}

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

namespace {

// With n = (x − mean)·rstd and g = dy·weight: dx = rstd·(g − mean(g) − n·mean(g·n)), without mean(g) in an
// rms norm. The gradients of weight and bias, Σ dy·n and Σ dy over rows, are summed by each block over its
// rows, and then over blocks.

// What rows ahead take.
std::size_t stages_bytes(const RowShape& shape, int stages) {
  return static_cast<std::size_t>(stages) * 2 * 16 * static_cast<std::size_t>(shape.chunks * shape.threads);
}

RowShape late_shape(int count) {
  const int threads = ((count + late_chunks - 1) / late_chunks + 31) / 32 * 32;
  return {.in_chunks = true, .late = true, .chunks = late_chunks, .threads = threads};
}

// Whether late_kernel is for rows of so many chunks. On an H200 it takes 0.85 to 0.99 of chunks_kernel's time
// for rows of an rms norm of 768 to 8192 elements of bf16; layer norms gain more. f16 was not measured.
bool joins_late(const NormCall& call, int count, const DeviceProperties& device) {
  return size_of(call.problem.dtype) == 2 && count >= 96 && count <= late_chunks * late_threads &&
         stages_bytes(late_shape(count), late_stages) <= device.shared_bytes;
}

// Where one row of x and dy is more than shared memory has, elements are taken one by one.
RowShape backward_shape(const NormCall& call, const DeviceProperties& device) {
  RowShape shape = shape_of(call);
  if (!shape.in_chunks) return shape;
  const auto size = 16 / static_cast<int>(size_of(call.problem.dtype));
  const auto count = static_cast<int>(call.problem.dim) / size, held = columns_held / size;
  if (joins_late(call, count, device)) return late_shape(count);
  shape.one_warp = count <= 32 * held;
  shape.chunks = held;
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

// What shapes there are.
template <typename T, typename Body>
void with_backward_shape(const RowShape& shape, const Body& body) {
  constexpr int held = columns_held / chunk_size<T>;
  if (shape.one_warp) {
    return shape.chunks == 1 ? body.template operator()<1, true>() : body.template operator()<held, true>();
  }
  if (shape.chunks == held) return body.template operator()<held, false>();
  shape.chunks == 2 ? body.template operator()<2, false>() : body.template operator()<4, false>();
}

// How many pieces rows are summed in: blocks that stay, or strips.
int pieces_of(const NormCall& call, const RowShape& shape, int multiprocessors) {
  const NormProblem& problem = call.problem;
  if (!shape.in_chunks) return row_strips(problem.rows, problem.dim, multiprocessors);
  const int blocks_each = (shape.late ? late_threads : resident_threads) / shape.threads;
  return blocks_that_stay((problem.rows + shape.rows - 1) / shape.rows, multiprocessors, blocks_each);
}

}  // namespace

std::size_t backward_workspace(const NormCall& call, const Context& context) {
  Arena arena(nullptr);
  const DeviceProperties& device = device_properties(context.device.index);
  take_partials(arena, call, pieces_of(call, backward_shape(call, device), device.multiprocessors));
  return arena.used();
}

void backward(const NormCall& call, const Context& context) {
  const NormProblem& problem = call.problem;
  const DeviceProperties& device = device_properties(context.device.index);
  const RowShape shape = backward_shape(call, device);
  const int pieces = pieces_of(call, shape, device.multiprocessors);
  Arena arena(context.workspace.data);
  const Partials partials = take_partials(arena, call, pieces);
  const bool sums = call.d_weight.data != nullptr || call.d_bias.data != nullptr;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  with_types(problem, [&]<typename T, Norm norm>() {
    if (shape.in_chunks) {
      Launch how{
          .name = "tilewise norm backward", .blocks = pieces, .threads = shape.threads, .stream = stream};
      if constexpr (sizeof(T) == 2) {
        if (shape.late) {
          how.shared_bytes = asked_for(stages_bytes(shape, late_stages));
          return launch<late_kernel<T, norm>>(how, call, partials);
        }
      }
      return with_backward_shape<T>(shape, [&]<int chunks, bool one_warp>() {
        const auto run = [&]<int stages>() {
          how.shared_bytes = asked_for(stages_bytes(shape, stages));
          launch<chunks_kernel<T, norm, chunks, one_warp, stages>>(how, call, partials);
        };
        stages_bytes(shape, 3) <= device.shared_bytes ? run.template operator()<3>()
                                                      : run.template operator()<1>();
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
  sum_partials({partials.weight, call.d_weight}, {partials.bias, call.d_bias}, pieces, problem.dim, context);
}

}  // namespace tilewise::cuda::norm
