#include <algorithm>
#include <type_traits>

#include "core/arena.h"
#include "cuda/norm/config.h"
#include "cuda/norm/dispatch.cuh"
#include "cuda/ptx/async_copy.cuh"
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
  extern __shared__ __align__(16) uint4 slots_smem[];
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

/// Sums of all lanes, the same in all of them, on their way together.
template <int count>
__device__ __forceinline__ void sum_over_warp(float (&values)[count]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
    for (int n = 0; n < count; ++n) values[n] += __shfl_xor_sync(~0u, values[n], distance);
  }
}

/// Long rows of bf16, a block's each: 16 columns a thread, so that what it does for a row besides them weighs
/// less. The sums over a row are joined while the next row's are made: its second pass comes a row late, and
/// there is one barrier a row.
constexpr int late_threads = 512;  // of a multiprocessor: there are registers for 16 columns
constexpr int late_chunks = 2;
constexpr int late_stages = 4;  // two rows ahead, one in its first pass and one in its second

template <typename T, Norm norm>
__global__ void __launch_bounds__(late_threads)
    late_kernel(const __grid_constant__ NormCall call, const __grid_constant__ Partials partials) {
  constexpr int size = chunk_size<T>, chunks = late_chunks, stages = late_stages;
  constexpr int values = norm == Norm::layer ? 2 : 1;  // sums of g·n and of g
  using Row = Team<false>;
  const int count = static_cast<int>(call.problem.dim) / size;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const auto inverse = 1.0f / static_cast<float>(call.problem.dim);
  const auto at_of = [](int c) { return Row::thread() + c * Row::size(); };
  float d_weight[chunks][size] = {}, d_bias[chunks][size] = {}, weight[chunks][size];
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
#pragma unroll
    for (int e = 0; e < size; ++e) weight[c][e] = 1;
    if (at_of(c) < count && call.weight.data != nullptr) {
      load_vector_chunk<T>(weight[c], call.weight, at_of(c) * size);
    }
  }
  extern __shared__ __align__(16) uint4 slots_smem[];
  __shared__ float of_warps[2][values][32];
  const RowsAhead<T, chunks, false, stages> ahead{slots_smem};
  const std::int64_t rows = call.problem.rows, step = Row::count();
#pragma unroll
  for (int stage = 0; stage < stages - 2; ++stage) {
    ahead.fetch(call, Row::number() + stage * step, stage, count);
  }
  const auto statistics = [&](std::int64_t m) {
    if (m >= rows) return float2{};
    return float2{norm == Norm::layer ? statistic(call.mean, m) : 0.0f, statistic(call.rstd, m)};
  };
  float2 next = statistics(Row::number()), before{};
  int stage = 0, place = 0;
#pragma unroll 1
  for (std::int64_t m = Row::number(); m < rows + step; m += step) {
    const std::int64_t last = m - step;  // the row that has its second pass
    const bool second = last >= 0 && call.dx.data != nullptr;
    ahead.fetch(call, m + (stages - 2) * step, (stage + stages - 2) % stages, count);
    RawChunk<T> more[chunks];
    if (second && call.d_sum.data != nullptr) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (at_of(c) < count) more[c].load(row_of<T>(call.d_sum, last) + at_of(c) * size);
      }
    }
    const float2 own = next;
    next = statistics(m + step);  // a row ahead, too
    wait_copies<stages - 2>();    // for this row
    if (m < rows) {
      float sums[values] = {};
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (at_of(c) >= count) continue;
        float n[size], g[size];
        ahead.get(n, stage, 0, c);
        ahead.get(g, stage, 1, c);
#pragma unroll
        for (int e = 0; e < size; ++e) {
          n[e] = (n[e] - own.x) * own.y;
          d_weight[c][e] += g[e] * n[e];
          if constexpr (norm == Norm::layer) d_bias[c][e] += g[e];
          g[e] *= weight[c][e];
          sums[0] += g[e] * n[e];
          if constexpr (norm == Norm::layer) sums[1] += g[e];
        }
      }
      sum_over_warp(sums);
      if (lane == 0) {
#pragma unroll
        for (int v = 0; v < values; ++v) of_warps[place][v][warp] = sums[v];
      }
    }
    if (second) {
      float sums[values];
#pragma unroll
      for (int v = 0; v < values; ++v) {
        sums[v] = lane < static_cast<int>(blockDim.x) / 32 ? of_warps[place ^ 1][v][lane] : 0.0f;
      }
      sum_over_warp(sums);
      // dx = rstd·g − n·slope − shift
      const float slope = before.y * sums[0] * inverse;
      float shift = 0;
      if constexpr (norm == Norm::layer) shift = before.y * sums[1] * inverse;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (at_of(c) >= count) continue;
        float n[size], dx[size];
        ahead.get(n, (stage + stages - 1) % stages, 0, c);
        ahead.get(dx, (stage + stages - 1) % stages, 1, c);
#pragma unroll
        for (int e = 0; e < size; ++e) {
          dx[e] = before.y * (dx[e] * weight[c][e]) - shift - (n[e] - before.x) * before.y * slope;
        }
        if (call.d_sum.data != nullptr) {
          float added[size];
          more[c].spread(added);
#pragma unroll
          for (int e = 0; e < size; ++e) dx[e] += added[e];
        }
        store_chunk(row_of<T>(call.dx, last) + at_of(c) * size, dx);
      }
    }
    __syncthreads();  // this row's sums are there, the last one's were read
    before = own;
    place ^= 1;
    stage = (stage + 1) % stages;
  }
  leave_partials<T, chunks, false>(d_weight, partials.weight, count);
  if constexpr (norm == Norm::layer) leave_partials<T, chunks, false>(d_bias, partials.bias, count);
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

// What rows ahead take.
std::size_t ring_bytes(const RowShape& shape, int stages) {
  return static_cast<std::size_t>(stages) * 2 * 16 * static_cast<std::size_t>(shape.chunks * shape.threads);
}

// Beyond 48 KiB with the kernel's own variables it has to be asked for, which a launch does beyond 48 KiB
// without them.
std::size_t asked_for(std::size_t bytes) {
  constexpr std::size_t own = 2048, without_asking = 48 * 1024;
  return bytes + own > without_asking ? std::max(bytes, without_asking + 16) : bytes;
}

// Whether late_kernel is for it: for layer norms, which have twice as much to sum. On an H200 it takes 0.74
// to 0.9 of chunks_kernel's time for their rows of 768 to 8192 elements, and for rms norms 1.1 to 1.5.
// f16 was not measured.
bool joins_late(const NormCall& call, const RowShape& shape) {
  return shape.in_chunks && !shape.one_warp && call.problem.norm == Norm::layer &&
         call.problem.dtype == DType::bf16 && shape.chunks == late_chunks && shape.threads <= late_threads;
}

// Where one row of x and dy is more than shared memory has, elements are taken one by one.
RowShape backward_shape(const NormCall& call, const DeviceProperties& device) {
  RowShape shape = shape_of(call);
  if (!shape.in_chunks) return shape;
  const auto size = 16 / static_cast<int>(size_of(call.problem.dtype));
  const auto count = static_cast<int>(call.problem.dim) / size, held = columns_held / size;
  shape.one_warp = count <= 32 * held;
  shape.chunks = held;
  if (shape.one_warp) {
    if (count <= 32) shape.chunks = 1;
    shape.threads = 256;
    shape.rows = 8;
  } else {
    const bool late = call.problem.norm == Norm::layer && call.problem.dtype == DType::bf16 && count >= 96 &&
                      count <= late_chunks * late_threads;
    if (late) shape.chunks = late_chunks;
    while (count > shape.chunks * resident_threads) shape.chunks *= 2;
    shape.threads = ((count + shape.chunks - 1) / shape.chunks + 31) / 32 * 32;
    shape.rows = 1;
  }
  return ring_bytes(shape, 1) <= device.shared_bytes ? shape : RowShape{};
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
  const int blocks_each = (joins_late(call, shape) ? late_threads : resident_threads) / shape.threads;
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
      return with_backward_shape<T>(shape, [&]<int chunks, bool one_warp>() {
        Launch how{
            .name = "tilewise norm backward", .blocks = pieces, .threads = shape.threads, .stream = stream};
        if constexpr (norm == Norm::layer && !one_warp && chunks == late_chunks &&
                      std::is_same_v<T, __nv_bfloat16>) {
          if (joins_late(call, shape)) {
            how.shared_bytes = asked_for(ring_bytes(shape, late_stages));
            return launch<late_kernel<T, norm>>(how, call, partials);
          }
        }
        const auto run = [&]<int stages>() {
          how.shared_bytes = asked_for(ring_bytes(shape, stages));
          launch<chunks_kernel<T, norm, chunks, one_warp, stages>>(how, call, partials);
        };
        ring_bytes(shape, 3) <= device.shared_bytes ? run.template operator()<3>()
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
  if (partials.weight != nullptr) sum_partials(partials.weight, pieces, problem.dim, call.d_weight, context);
  if (partials.bias != nullptr) sum_partials(partials.bias, pieces, problem.dim, call.d_bias, context);
}

}  // namespace tilewise::cuda::norm
