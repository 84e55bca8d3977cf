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

// A product with one row of a, which a block's threads keep in registers while b, the weights, streams by
// once, from memory straight into registers. A block has a run of rows of b, equally long for all but for
// one row, and its threads share each row by summands, 16 bytes at a time, so that a warp reads 512 bytes on
// end. Rows to come are under way while one is multiplied. Warps leave their sums in shared memory and meet
// once, after the last row. Where gated, rows of the gate and of what it gates take turns.

struct StreamArguments {
  GemmCall call;
  InChain place;
  int rows = 0;    ///< that each block has
  int longer = 0;  ///< so many blocks have one more
};

template <typename T, bool gated, StreamConfig c>
struct WeightStream {
  static constexpr int factors = gated ? 2 : 1;
  static constexpr int slots = c.rows_ahead();
  static_assert(slots % factors == 0);
  const GemmCall& call;
  const int first;   ///< row of b
  const int rows;    ///< of all factors
  const int chunks;  ///< of a row
  const std::byte* from[factors];
  int stride[factors];  ///< in bytes
  uint4 under_way[slots][c.pieces];
  float x[c.pieces][8];

  __device__ __forceinline__ explicit WeightStream(const StreamArguments& arguments)
      : call(arguments.call),
        first(static_cast<int>(blockIdx.x) * arguments.rows +
              min(static_cast<int>(blockIdx.x), arguments.longer)),
        rows(factors * (arguments.rows + (static_cast<int>(blockIdx.x) < arguments.longer ? 1 : 0))),
        chunks(static_cast<int>(arguments.call.problem.k) / 8) {
#pragma unroll
    for (int f = 0; f < factors; ++f) {
      const Matrix& factor = gated && f == 0 ? call.gate : call.b;
      stride[f] = static_cast<int>(factor.stride_row) * 2;
      from[f] = factor.data + std::int64_t{first} * stride[f];
    }
  }

  __device__ __forceinline__ static int chunk(int piece) {
    return static_cast<int>(threadIdx.x) + piece * c.threads;
  }
  /// Row `round` of a slot's.
  __device__ __forceinline__ const std::byte* row_of(int slot, int round) const {
    const int row = (round * slots + slot) / factors;
    return from[slot % factors] + std::int64_t{row} * stride[slot % factors];
  }

  __device__ __forceinline__ void load(int slot, int piece, int round) {
    under_way[slot][piece] = load_once(row_of(slot, round) + 16 * chunk(piece),
                                       round * slots + slot < rows && chunk(piece) < chunks);
  }
  __device__ __forceinline__ void load_first() {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
#pragma unroll
      for (int piece = 0; piece < c.pieces; ++piece) load(slot, piece, 0);
    }
  }
  /// Has the first rows come to the L2.
  __device__ __forceinline__ void prefetch_first() const {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      if (static_cast<int>(threadIdx.x) == 32 * slot && slot < rows) {
        prefetch_l2(row_of(slot, 0), static_cast<std::uint32_t>(chunks) * 16);
      }
    }
  }
  __device__ __forceinline__ void load_token() {
#pragma unroll
    for (int piece = 0; piece < c.pieces; ++piece) {
#pragma unroll
      for (float& summand : x[piece]) summand = 0;
      if (chunk(piece) < chunks)
        load_chunk(x[piece], reinterpret_cast<const T*>(call.a.data) + 8 * chunk(piece));
    }
  }

  /// The thread's sum of the row in a slot, whose place its next row takes.
  __device__ __forceinline__ float multiply(int slot, int round) {
    float sum = 0;
#pragma unroll
    for (int piece = 0; piece < c.pieces; ++piece) {
      // Element by element: with RawChunk's way ptxas keeps too many at a time, and spills.
      const auto* weights = reinterpret_cast<const T*>(&under_way[slot][piece]);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(widen(weights[e]), x[piece][e], sum);
      load(slot, piece, round + 1);
    }
    return sum;
  }

  /// Adds up what lanes have of several rows: halves of the warp exchange halves of the rows until each lane
  /// has one row, which lanes that have the same one add up. The lane's row is lane · slots / 32.
  __device__ __forceinline__ static float add_lanes(float (&sums)[slots], int lane) {
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
  TILEWISE_DYNAMIC_SHARED(float, of_warps_smem, alignof(float));  // [rows][pitch]
  const GemmCall& call = arguments.call;
  Stream stream(arguments);
  if (arguments.place == InChain::second) {
    stream.load_first();
    let_kernel_behind_begin();
    wait_for_kernel_ahead();
  } else {
    stream.prefetch_first();
    wait_for_kernel_ahead();
    let_kernel_behind_begin();
    stream.load_first();
  }
  stream.load_token();

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int round = 0; round * Stream::slots < stream.rows; ++round) {
    float sums[Stream::slots];
#pragma unroll
    for (int slot = 0; slot < Stream::slots; ++slot) sums[slot] = stream.multiply(slot, round);
    const float sum = Stream::add_lanes(sums, lane);
    const int row = round * Stream::slots + lane * Stream::slots / 32;
    if (lane % (32 / Stream::slots) == 0) of_warps_smem[row * c.pitch + warp] = sum;
  }
  __syncthreads();  // all warps' sums are there
  for (int row = static_cast<int>(threadIdx.x); row < stream.rows / Stream::factors; row += c.threads) {
    float totals[Stream::factors] = {};
#pragma unroll
    for (int f = 0; f < Stream::factors; ++f) {
#pragma unroll
      for (int w = 0; w < c.warps; ++w) totals[f] += of_warps_smem[(row * Stream::factors + f) * c.pitch + w];
    }
    finish_element<T, true>(call, 0, stream.first + row, totals[Stream::factors - 1], totals[0]);
  }
}

inline int stream_blocks(const GemmProblem& problem, int multiprocessors) {
  return static_cast<int>(std::clamp<std::int64_t>(problem.n, 1, multiprocessors));
}

/// Bytes of shared memory: rows are filled up to whole turns.
inline std::size_t stream_bytes(const GemmProblem& problem, int blocks, InChain place) {
  const std::int64_t rows = (problem.n + blocks - 1) / blocks * (problem.gated ? 2 : 1);
  const std::size_t needed = static_cast<std::size_t>(rows + 8) * StreamConfig::pitch * sizeof(float);
  return place == InChain::first ? std::max(needed, first_bytes) : needed;
}

/// Whether it can take a problem that few_rows takes.
inline bool suits_stream(const GemmCall& call, int multiprocessors) {
  const GemmProblem& problem = call.problem;
  constexpr std::int64_t longest = std::int64_t{1} << 30;
  return problem.m == 1 && problem.k % 8 == 0 && problem.k <= Streams::most_summands() &&
         std::max(call.b.stride_row, call.gate.stride_row) < longest &&
         stream_bytes(problem, stream_blocks(problem, multiprocessors), InChain::second) <= second_bytes;
}

template <typename T>
void run_stream(const GemmCall& call, int multiprocessors, InChain place, cudaStream_t stream) {
  const GemmProblem& problem = call.problem;
  const int blocks = stream_blocks(problem, multiprocessors);
  const Launch how{.name = "tilewise gemm of a stream of weights",
                   .blocks = blocks,
                   .threads = StreamConfig::threads,
                   .shared_bytes = stream_bytes(problem, blocks, place),
                   .stream = stream,
                   .early = true};
  const StreamArguments arguments{.call = call,
                                  .place = place,
                                  .rows = static_cast<int>(problem.n / blocks),
                                  .longer = static_cast<int>(problem.n % blocks)};
  const int suited = first_row<Streams>([&](const StreamConfig& c) { return problem.k <= c.summands(); });
  with_row<Streams>(suited, [&](auto row) {
    problem.gated ? launch<stream_kernel<T, true, row>>(how, arguments)
                  : launch<stream_kernel<T, false, row>>(how, arguments);
  });
}

}  // namespace tilewise::cuda::gemm
