#include "cuda/norm/common/backward_passes.cuh"
#include "cuda/norm/common/config.h"
#include "cuda/norm/common/dispatch.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/bias.cuh"
#include "cuda/tile/column_sums.h"

namespace tilewise::cuda::norm {

// Kernel `ring`. It works as pipelined_kernel does, but rows arrive by bulk copies (sm_90 on): one thread
// starts one copy each for a row of x and of dy. All threads have equally many chunks of a row, so none
// checks whether a chunk exists. The first and the last step of a CTA, which have one pass only, are outside
// the loop.

__device__ __forceinline__ std::int64_t row_number(int n) {  // of the CTA's row n
  return blockIdx.x + std::int64_t{gridDim.x} * n;
}
__device__ __forceinline__ std::uint32_t address_of(const void* smem) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
}

/// Rows of x and dy in shared memory: two being loaded, one in its first pass and one in its second.
template <typename T>
struct RowRing {
  static constexpr int chunks = pipelined_chunks, stages = pipelined_stages, ahead = stages - 2;

  uint4* slots_smem;              ///< [stages][x, dy][count]
  Mbarrier* full_smem;            ///< [stages]: completes a phase when a row has arrived
  const T *x_gmem, *dy_gmem;      ///< of the row to be copied next
  const int threads, total;       ///< of the CTA; its rows
  const int count;                ///< chunks of a row
  const std::uint32_t stage_0;    ///< address of the thread's first chunk in stage 0
  std::uint32_t current, before;  ///< the same in the stage of this row, and of the row before
  int stage = 0, parity = 0;

  __device__ RowRing(const NormCall& call, uint4* slots, Mbarrier* full, int rows)
      : slots_smem(slots),
        full_smem(full),
        x_gmem(row_of<T>(call.x, blockIdx.x)),
        dy_gmem(row_of<T>(call.dy, blockIdx.x)),
        threads(static_cast<int>(blockDim.x)),
        total(rows),
        count(chunks * threads),
        stage_0(address_of(slots + threadIdx.x)),
        current(stage_0),
        before(stage_0) {}

  /// Called by one thread, before a barrier of the CTA. Initialises the mbarriers and starts the first
  /// copies.
  __device__ __forceinline__ void begin(const NormCall& call) {
    for (int n = 0; n < stages; ++n) init_barrier(&full_smem[n], 1);
    fence_barrier_inits();
    for (int n = 0; n < ahead; ++n) fetch(call, n);
  }
  /// Called by the same thread for one row after another. All threads must have read the row that its stage
  /// had before.
  __device__ __forceinline__ void fetch(const NormCall& call, int n) {
    if (n >= total) return;
    Mbarrier* const barrier = &full_smem[n % stages];
    uint4* const to = slots_smem + n % stages * 2 * count;
    arrive_expecting(barrier, 2 * 16 * count);
    copy_bytes(to, x_gmem, 16 * count, barrier);
    copy_bytes(to + count, dy_gmem, 16 * count, barrier);
    x_gmem += gridDim.x * call.x.stride_row;
    dy_gmem += gridDim.x * call.dy.stride_row;
  }
  __device__ __forceinline__ void wait_for_row() {
    wait(&full_smem[stage], static_cast<std::uint32_t>(parity));
    pin_address(current);
  }
  /// Loads the thread's chunks from the stage whose address is `from`.
  __device__ __forceinline__ void load(RawChunk<T> (&x)[chunks], RawChunk<T> (&dy)[chunks],
                                       std::uint32_t from) const {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      x[c].bytes = load_pinned_16(from + 16 * c * threads);
      dy[c].bytes = load_pinned_16(from + 16 * (c * threads + count));
    }
  }
  __device__ __forceinline__ void advance() {
    before = current;
    current += 2 * 16 * count;
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
      current = stage_0;
    }
  }
};

/// Mean and rstd of some of the CTA's rows.
struct RowStatistics {
  static constexpr int rows = 128;

  float2* table_smem;  ///< [rows]
  std::uint32_t table = address_of(table_smem);

  /// Called by all threads, before a barrier of the CTA.
  __device__ __forceinline__ void load(const NormCall& call, int first, int total) const {
    for (int n = static_cast<int>(threadIdx.x); n < rows && first + n < total;
         n += static_cast<int>(blockDim.x)) {
      const std::int64_t m = row_number(first + n);
      table_smem[n] = {statistic(call.mean, m), statistic(call.rstd, m)};
    }
  }
  __device__ __forceinline__ float2 at(int n) {
    pin_address(table);
    return load_pinned_8(table + n % rows * sizeof(float2));
  }
};

/// `adds`: d_sum is added to dx.
template <typename T, Norm norm, bool adds>
__global__ void __launch_bounds__(pipelined_threads)
    ring_kernel(const __grid_constant__ NormCall call, const __grid_constant__ Partials partials) {
#if __CUDA_ARCH__ >= 900
  constexpr int size = chunk_size<T>, chunks = pipelined_chunks;
  TILEWISE_DYNAMIC_SHARED(uint4, ring_smem, 16);
  __shared__ Mbarrier full_smem[pipelined_stages];
  __shared__ float2 statistics_smem[RowStatistics::rows];
  // The warps' sums of a row, alternating between rows: of g·x̂ for up to 16 warps, then of g.
  __shared__ float warp_sums[2][32];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32;
  const auto inverse_dim = 1.0f / static_cast<float>(call.problem.dim);
  // There are no more CTAs than rows, so a CTA has at least one row.
  const auto total = static_cast<int>((call.problem.rows - blockIdx.x + gridDim.x - 1) / gridDim.x);
  RowRing<T> rows(call, ring_smem, full_smem, total);
  RowStatistics statistics{statistics_smem};
  if (thread == 0) rows.begin(call);
  statistics.load(call, 0, total);
  if (thread < 64) warp_sums[thread / 32][lane] = 0;  // for warps that the CTA does not have
  OwnColumns<T, norm> columns;
#pragma unroll
  for (int n = 0; n < chunks * size; ++n) {
    const int at = (thread + n / size * threads) * size + n % size;
    columns.weight[n / size][n % size] = call.weight.data == nullptr ? 1.0f : bias_at<T>(call.weight, at);
  }
  __syncthreads();  // mbarriers, the first statistics and the zeros are in shared memory

  T* dx_gmem = row_of<T>(call.dx, blockIdx.x) + thread * size;
  const T* d_sum_gmem = adds ? row_of<T>(call.d_sum, blockIdx.x) + thread * size : nullptr;
  const std::int64_t dx_step = gridDim.x * call.dx.stride_row, d_sum_step = gridDim.x * call.d_sum.stride_row;
  std::uint32_t warp_sums_at = address_of(warp_sums) + 4 * lane;
  float2 row_before{};  // mean and rstd of the row before
  // The first pass of row n, and the second of row n - 1.
  const auto step = [&]<bool first, bool second>(int n) {
    if (thread == 0) rows.fetch(call, n + rows.ahead);
    RawChunk<T> x[chunks], dy[chunks], d_sum[chunks];
    if constexpr (second && adds) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) d_sum[c].load(d_sum_gmem + c * threads * size);
      d_sum_gmem += d_sum_step;
    }
    float2 row{};
    if constexpr (first) {
      if (n % RowStatistics::rows == 0 && n > 0) {
        statistics.load(call, n, total);
        __syncthreads();  // the statistics are in shared memory; row_before is in registers
      }
      rows.wait_for_row();
      row = statistics.at(n);
    }
    Correction<norm> correction;
    if constexpr (second) {
      pin_address(rows.before);
      pin_address(warp_sums_at);
      correction = {row_before, load_pinned_4(warp_sums_at + (n - 1) % 2 * sizeof warp_sums[0]), inverse_dim};
    }
    if constexpr (first) {
      rows.load(x, dy, rows.current);
      float sum_gx = 0, sum_g = 0;
#pragma unroll
      for (int c = 0; c < chunks; ++c) columns.first_pass(c, x[c], dy[c], row, sum_gx, sum_g);
      const float sum = sum_halves(sum_gx, sum_g);
      if (lane % 16 == 0) warp_sums[n % 2][warp + lane] = sum;
    }
    if constexpr (second) {
      rows.load(x, dy, rows.before);
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        float dx[size];
        columns.second_pass(dx, c, x[c], dy[c], correction);
        if constexpr (adds) add_chunk(dx, d_sum[c]);
        store_chunk(dx_gmem + c * threads * size, dx);
      }
      dx_gmem += dx_step;
    }
    // All warps have stored this row's sums, and have read the row before and its sums: its stage is free.
    __syncthreads();
    row_before = row;
    rows.advance();
  };
  step.template operator()<true, false>(0);
#pragma unroll 1
  for (int n = 1; n < total; ++n) step.template operator()<true, true>(n);
  step.template operator()<false, true>(total);
  columns.store(partials, rows.count);
#endif
}

namespace {

int threads_of(const NormProblem& problem) {
  return static_cast<int>(problem.dim) * static_cast<int>(size_of(problem.dtype)) / 16 / pipelined_chunks;
}

int blocks_of(const NormProblem& problem) {
  return persistent_ctas(problem.rows, device_properties(problem.device.index).multiprocessors,
                         pipelined_threads / threads_of(problem));
}

}  // namespace

std::size_t ring_bytes(const NormProblem& problem) {
  return dynamic_shared_bytes(std::size_t{pipelined_stages} * 2 * static_cast<std::size_t>(problem.dim) *
                              size_of(problem.dtype));
}

std::size_t ring_workspace(const NormCall& call, const Context&) {
  Arena arena(nullptr);
  take_partials(arena, call, blocks_of(call.problem));
  return arena.used();
}

void ring_backward(const NormCall& call, const Context& context) {
  const NormProblem& problem = call.problem;
  const int blocks = blocks_of(problem);
  Arena arena(context.workspace.data);
  const Partials partials = take_partials(arena, call, blocks);
  with_types(problem, [&]<typename T, Norm norm>() {
    if constexpr (sizeof(T) == 2) {
      const Launch how{.name = "tilewise norm backward, ring",
                       .blocks = blocks,
                       .threads = threads_of(problem),
                       .shared_bytes = ring_bytes(problem),
                       .stream = static_cast<cudaStream_t>(context.stream)};
      call.d_sum.data == nullptr ? launch<ring_kernel<T, norm, false>>(how, call, partials)
                                 : launch<ring_kernel<T, norm, true>>(how, call, partials);
    }
  });
  sum_partials({partials.weight, call.d_weight}, {partials.bias, call.d_bias}, blocks, problem.dim, context);
}

}  // namespace tilewise::cuda::norm
