#pragma once

#include <algorithm>

#include "cuda/gemm/finish.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::gemm {

// A product with one row of a, or a few, which stay in shared memory while b, the weights, streams by once,
// from memory straight into registers. A block's 16 warps have the same eight rows of b, each every sixteenth
// 32 summands of them; a lane loads 16 bytes, which are its part of two fragments of mma.sync: summands are
// taken in the order in which lanes have them, of a and b alike. A lane has eight such pieces under way: as
// soon as one is multiplied, the one eight on takes its place, across rows too.

struct StreamArguments {
  GemmCall call;
  int groups = 0;  ///< of eight rows of b
};

inline constexpr int stream_threads = 512;

/// The most rows of a. The kernel could take eight, but copies them into shared memory before it begins: on
/// an H200 a network of 4096 and 11008 features took 77 µs with one token, 89 with four, and by few_kernel 78
/// with 16.
inline constexpr int stream_tokens = 1;

/// Rows of a in shared memory lie apart by 64 bytes more than they are long, so that those of eight lanes lie
/// in all banks. Before them are two groups' sums of all warps.
inline std::size_t stream_bytes(const GemmProblem& problem) {
  const std::size_t sums = 2 * (stream_threads / 32) * (problem.gated ? 2 : 1) * 64 * sizeof(float);
  return sums + static_cast<std::size_t>(problem.m) * (static_cast<std::size_t>(problem.k) * 2 + 64);
}

template <typename T, bool gated>
struct WeightStream {
  static constexpr int warps = stream_threads / 32;
  static constexpr int factors = gated ? 2 : 1;
  static constexpr int slots = 8 / factors;  ///< pieces of 32 summands that are under way

  const GemmCall& call;
  const int warp, lane;
  const int batches;  ///< of so many pieces, that a group of rows has
  uint4 under_way[slots][factors];

  __device__ __forceinline__ explicit WeightStream(const GemmCall& call_)
      : call(call_),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        batches((static_cast<int>(call_.problem.k) + 32 * warps * slots - 1) / (32 * warps * slots)) {}

  /// The lane's first summand of a piece.
  __device__ __forceinline__ int summand(int piece) const {
    return (piece * warps + warp) * 32 + lane % 4 * 8;
  }

  __device__ __forceinline__ void load(int slot, int group, int batch) {
    const std::int64_t row = static_cast<std::int64_t>(group) * 8 + lane / 4;
    const int k = summand(batch * slots + slot);
#pragma unroll
    for (int f = 0; f < factors; ++f) {
      const Matrix& factor = gated && f == 0 ? call.gate : call.b;
      const auto* from = reinterpret_cast<const T*>(factor.data) + row * factor.stride_row + k;
      under_way[slot][f] = uint4{};
      if (row < call.problem.n && k < call.problem.k) {
        under_way[slot][f] = __ldcs(reinterpret_cast<const uint4*>(from));
      }
    }
  }
  __device__ __forceinline__ void load_first(int group) {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) load(slot, group, 0);
  }

  __device__ __forceinline__ void multiply(float (&sums)[factors][4], int slot, int batch,
                                           const std::byte* tokens_smem) const {
    const auto m = static_cast<int>(call.problem.m), k_end = static_cast<int>(call.problem.k);
    const int k = summand(batch * slots + slot);
    const std::byte* from = tokens_smem + lane / 4 * (k_end * 2 + 64) + k * 2;
    uint4 x{};
    if (lane / 4 < m && k < k_end) x = *reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int f = 0; f < factors; ++f) {
      const uint4& weights = under_way[slot][f];
      multiply_matrices<T>(sums[f], {x.x, 0, x.y, 0}, weights.x, weights.y);
      multiply_matrices<T>(sums[f], {x.z, 0, x.w, 0}, weights.z, weights.w);
    }
  }
};

template <typename T, bool gated>
__global__ void __launch_bounds__(stream_threads, 2)
    stream_kernel(const __grid_constant__ StreamArguments arguments) {
  using Stream = WeightStream<T, gated>;
  extern __shared__ __align__(16) std::byte stream_smem[];
  using OfWarps = float[2][Stream::warps][Stream::factors][64];
  OfWarps& of_warps = *reinterpret_cast<OfWarps*>(stream_smem);
  std::byte* tokens_smem = stream_smem + sizeof(OfWarps);
  const GemmCall& call = arguments.call;
  Stream stream(call);
  const auto blocks = static_cast<std::int64_t>(gridDim.x);
  const int begin = static_cast<int>(arguments.groups * static_cast<std::int64_t>(blockIdx.x) / blocks);
  const int end = static_cast<int>(arguments.groups * (static_cast<std::int64_t>(blockIdx.x) + 1) / blocks);

  stream.load_first(begin);  // nothing that the kernel ahead writes
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  const auto k = static_cast<int>(call.problem.k);
  for (int index = static_cast<int>(threadIdx.x); index < static_cast<int>(call.problem.m) * (k / 8);
       index += stream_threads) {
    const int token = index / (k / 8), chunk = index % (k / 8);
    *reinterpret_cast<uint4*>(tokens_smem + token * (k * 2 + 64) + chunk * 16) =
        *reinterpret_cast<const uint4*>(call.a.data + token * call.a.stride_row * 2 + chunk * 16);
  }
  __syncthreads();  // tokens are there

#pragma unroll 1
  for (int group = begin; group < end; ++group) {
    float sums[Stream::factors][4] = {};
#pragma unroll 1
    for (int batch = 0; batch < stream.batches; ++batch) {
      const bool last = batch + 1 == stream.batches;
      const int next_group = last ? group + 1 : group, next_batch = last ? 0 : batch + 1;
#pragma unroll
      for (int slot = 0; slot < Stream::slots; ++slot) {
        stream.multiply(sums, slot, batch, tokens_smem);
        if (next_group < end) stream.load(slot, next_group, next_batch);
      }
    }
    // Tokens g and rows 2t, 2t + 1 of the group; what sums of two groups before were is read.
    float(&places)[Stream::warps][Stream::factors][64] = of_warps[group % 2];
#pragma unroll
    for (int f = 0; f < Stream::factors; ++f) {
      *reinterpret_cast<float2*>(&places[stream.warp][f][stream.lane * 2]) = {sums[f][0], sums[f][1]};
    }
    __syncthreads();  // all warps' sums are there
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < 64 && thread / 8 < call.problem.m) {
      float total[2] = {0, 0};
#pragma unroll
      for (int w = 0; w < Stream::warps; ++w) {
#pragma unroll
        for (int f = 0; f < Stream::factors; ++f) total[f] += places[w][f][thread];
      }
      finish_element<T, true>(call, thread / 8, static_cast<std::int64_t>(group) * 8 + thread % 8,
                              total[Stream::factors - 1], total[0]);
    }
  }
}

/// Whether it can take a problem that few_rows takes.
inline bool suits_stream(const GemmProblem& problem) {
  constexpr std::size_t most = 200 * 1024;
  return problem.m <= stream_tokens && problem.k % 8 == 0 && stream_bytes(problem) <= most;
}

template <typename T>
void run_stream(const GemmCall& call, int multiprocessors, bool early, cudaStream_t stream) {
  const StreamArguments arguments{call, static_cast<int>((call.problem.n + 7) / 8)};
  const Launch how{.name = "tilewise gemm of a stream of weights",
                   .blocks = std::min(multiprocessors, arguments.groups),
                   .threads = stream_threads,
                   .shared_bytes = stream_bytes(call.problem),
                   .stream = stream,
                   .early = early};
  call.problem.gated ? launch<stream_kernel<T, true>>(how, arguments)
                     : launch<stream_kernel<T, false>>(how, arguments);
}

}  // namespace tilewise::cuda::gemm
