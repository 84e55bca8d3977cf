#pragma once

#include "cuda/norm/common/backward_passes.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/runtime/dynamic_shared.cuh"

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

}  // namespace tilewise::cuda::norm
