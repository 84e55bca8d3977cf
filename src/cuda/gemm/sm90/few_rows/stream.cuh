#pragma once

#include <algorithm>

#include "cuda/gemm/common/finish.cuh"
#include "cuda/gemm/sm90/few_rows/few_chain.h"
#include "cuda/gemm/sm90/few_rows/stream_tuning.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/load_once.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::gemm {

// GEMV: a product with one row of A. The threads of a CTA keep that row in registers while B, the weights,
// streams once from memory straight into registers. A CTA has a run of rows of B, and runs differ by at most
// one row. Its threads share each row along K in chunks of 16 bytes, so that a warp reads 512 contiguous
// bytes. The next rows are in flight while one is multiplied. Warps store their sums of each row in shared
// memory, and the CTA meets once, after the last row. With a gate, rows of the gate alternate with the rows
// that they gate.

struct StreamArguments {
  GemmCall call;
  InChain place;
  int rows = 0;         ///< of B that each CTA has
  int longer_ctas = 0;  ///< the first so many CTAs have one more
};

/// A thread's share of the CTA's rows. Row n is in slot n % slots of the registers.
template <typename T, bool gated, StreamConfig c>
struct WeightStream {
  static constexpr int matrices = gated ? 2 : 1;
  static constexpr int slots = c.rows_in_flight();
  static_assert(slots % matrices == 0);
  const GemmCall& call;
  const int first;  ///< row of B
  const int rows;   ///< of B, and of the gate's weights if gated
  const int row_chunks;
  const std::byte* from[matrices];
  int stride[matrices];  ///< in bytes
  uint4 in_flight[slots][c.chunks];
  float x[c.chunks][8];

  __device__ __forceinline__ explicit WeightStream(const StreamArguments& arguments)
      : call(arguments.call),
        first(static_cast<int>(blockIdx.x) * arguments.rows +
              min(static_cast<int>(blockIdx.x), arguments.longer_ctas)),
        rows(matrices * (arguments.rows + (static_cast<int>(blockIdx.x) < arguments.longer_ctas ? 1 : 0))),
        row_chunks(static_cast<int>(arguments.call.problem.k) / 8) {
#pragma unroll
    for (int f = 0; f < matrices; ++f) {
      const Matrix& matrix = gated && f == 0 ? call.gate : call.b;
      stride[f] = static_cast<int>(matrix.stride_row) * 2;
      from[f] = matrix.data + std::int64_t{first} * stride[f];
    }
  }

  __device__ __forceinline__ static int chunk(int index) {
    return static_cast<int>(threadIdx.x) + index * c.threads;
  }
  /// The row that a slot holds in round `round` of all slots.
  __device__ __forceinline__ const std::byte* row_of(int slot, int round) const {
    const int row = (round * slots + slot) / matrices;
    return from[slot % matrices] + std::int64_t{row} * stride[slot % matrices];
  }

  __device__ __forceinline__ void load(int slot, int index, int round) {
    in_flight[slot][index] = load_once(row_of(slot, round) + 16 * chunk(index),
                                       round * slots + slot < rows && chunk(index) < row_chunks);
  }
  __device__ __forceinline__ void load_first() {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
#pragma unroll
      for (int index = 0; index < c.chunks; ++index) load(slot, index, 0);
    }
  }
  /// Prefetches the first rows into the L2.
  __device__ __forceinline__ void prefetch_first() const {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      if (static_cast<int>(threadIdx.x) == 32 * slot && slot < rows) {
        prefetch_l2(row_of(slot, 0), static_cast<std::uint32_t>(row_chunks) * 16);
      }
    }
  }
  __device__ __forceinline__ void load_token() {
#pragma unroll
    for (int index = 0; index < c.chunks; ++index) {
#pragma unroll
      for (float& value : x[index]) value = 0;
      if (chunk(index) < row_chunks)
        load_chunk(x[index], reinterpret_cast<const T*>(call.a.data) + 8 * chunk(index));
    }
  }

  /// The thread's part of a slot's dot product. Loads of the slot's next row replace what has been used.
  __device__ __forceinline__ float dot(int slot, int round) {
    float sum = 0;
#pragma unroll
    for (int index = 0; index < c.chunks; ++index) {
      // Elements are widened one by one: with RawChunk ptxas keeps too many at a time, and spills.
      const auto* weights = reinterpret_cast<const T*>(&in_flight[slot][index]);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(widen(weights[e]), x[index][e], sum);
      load(slot, index, round + 1);
    }
    return sum;
  }

  /// Adds up the lanes' sums of several rows: halves of the warp exchange halves of the rows until each lane
  /// has one row; then the lanes that have the same row add theirs. A lane's row is lane · slots / 32.
  __device__ __forceinline__ static float reduce_lanes(float (&sums)[slots], int lane) {
    int apart = 16;
#pragma unroll
    for (int count = slots / 2; count >= 1; count /= 2, apart /= 2) {
      const bool upper = (lane & apart) != 0;
#pragma unroll
      for (int n = 0; n < count; ++n) {
        const float mine = upper ? sums[count + n] : sums[n];
        const float others = upper ? sums[n] : sums[count + n];
        sums[n] = mine + __shfl_xor_sync(~0u, others, apart);
      }
    }
#pragma unroll
    for (; apart >= 1; apart /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], apart);
    return sums[0];
  }
};

template <typename T, bool gated, int row_of_table>
__global__ void __launch_bounds__(StreamConfig::threads, 2)
    stream_kernel(const __grid_constant__ StreamArguments arguments) {
  constexpr StreamConfig c = Streams::rows[row_of_table];
  using Stream = WeightStream<T, gated, c>;
  TILEWISE_DYNAMIC_SHARED(float, warp_sums_smem, alignof(float));  // [rows][pitch]
  const GemmCall& call = arguments.call;
  Stream stream(arguments);
  if (arguments.place == InChain::second) {
    stream.load_first();
    let_next_kernel_start();
    wait_for_previous_kernel();  // it writes the token
  } else {
    stream.prefetch_first();
    wait_for_previous_kernel();  // it may write the weights and the token
    let_next_kernel_start();
    stream.load_first();
  }
  stream.load_token();

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int round = 0; round * Stream::slots < stream.rows; ++round) {
    float sums[Stream::slots];
#pragma unroll
    for (int slot = 0; slot < Stream::slots; ++slot) sums[slot] = stream.dot(slot, round);
    const float sum = Stream::reduce_lanes(sums, lane);
    const int row = round * Stream::slots + lane * Stream::slots / 32;
    if (lane % (32 / Stream::slots) == 0) warp_sums_smem[row * c.pitch + warp] = sum;
  }
  __syncthreads();  // all warps have stored their sums
  for (int row = static_cast<int>(threadIdx.x); row < stream.rows / Stream::matrices; row += c.threads) {
    float totals[Stream::matrices] = {};
#pragma unroll
    for (int f = 0; f < Stream::matrices; ++f) {
#pragma unroll
      for (int w = 0; w < c.warps; ++w)
        totals[f] += warp_sums_smem[(row * Stream::matrices + f) * c.pitch + w];
    }
    finish_element<T, true>(call, 0, stream.first + row, totals[Stream::matrices - 1], totals[0]);
  }
}

/// CTAs.
inline int stream_blocks(const GemmProblem& problem, int multiprocessors) {
  return static_cast<int>(std::clamp<std::int64_t>(problem.n, 1, multiprocessors));
}

/// Bytes of shared memory. The rows of a CTA are padded to whole rounds of at most 8 slots.
inline std::size_t stream_bytes(const GemmProblem& problem, int blocks, InChain place) {
  const std::int64_t rows = (problem.n + blocks - 1) / blocks * (problem.gated ? 2 : 1);
  const std::size_t needed = static_cast<std::size_t>(rows + 8) * StreamConfig::pitch * sizeof(float);
  return place == InChain::first ? std::max(needed, shared_of_first) : needed;
}

/// Whether stream_kernel can run a problem that few_rows takes.
inline bool suits_stream(const GemmCall& call, int multiprocessors) {
  const GemmProblem& problem = call.problem;
  constexpr std::int64_t longest = std::int64_t{1} << 30;
  return problem.m == 1 && problem.k % 8 == 0 && problem.k <= Streams::most_k() &&
         std::max(call.b.stride_row, call.gate.stride_row) < longest &&
         stream_bytes(problem, stream_blocks(problem, multiprocessors), InChain::second) <= shared_of_second;
}

template <typename T>
void run_stream(const GemmCall& call, int multiprocessors, InChain place, cudaStream_t stream) {
  const GemmProblem& problem = call.problem;
  const int blocks = stream_blocks(problem, multiprocessors);
  const Launch how{.name = "tilewise few_rows gemm, one row",
                   .blocks = blocks,
                   .threads = StreamConfig::threads,
                   .shared_bytes = stream_bytes(problem, blocks, place),
                   .stream = stream,
                   .early = true};
  const StreamArguments arguments{.call = call,
                                  .place = place,
                                  .rows = static_cast<int>(problem.n / blocks),
                                  .longer_ctas = static_cast<int>(problem.n % blocks)};
  const int suited = first_row<Streams>([&](const StreamConfig& c) { return problem.k <= c.most_k(); });
  with_row<Streams>(suited, [&](auto row) {
    problem.gated ? launch<stream_kernel<T, true, row>>(how, arguments)
                  : launch<stream_kernel<T, false, row>>(how, arguments);
  });
}

}  // namespace tilewise::cuda::gemm
