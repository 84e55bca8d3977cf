#pragma once

#include <algorithm>

#include "cuda/gemm/finish.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::gemm {

// A product with one to eight rows of a, which stay in shared memory while b, the weights, streams by once,
// from memory straight into registers. A block's 16 warps have the same eight rows of b, each every sixteenth
// 32 summands of them; a lane loads 16 bytes, which are its part of two fragments of mma.sync: summands are
// taken in the order in which lanes have them, of a and b alike. What the next products need is loaded
// before these are made, across rows too.

struct StreamArguments {
  GemmCall call;
  int groups = 0;  ///< of eight rows of b
};

inline constexpr int stream_threads = 512;
inline constexpr int stream_tokens = 8;

/// Rows of a in shared memory lie apart by 16 bytes more than they are long: eight lanes' in all banks.
inline std::size_t stream_bytes(const GemmProblem& problem) {
  return static_cast<std::size_t>(problem.m) * (static_cast<std::size_t>(problem.k) * 2 + 16);
}

template <typename T, bool gated>
struct WeightStream {
  static constexpr int warps = stream_threads / 32;
  static constexpr int factors = gated ? 2 : 1;
  static constexpr int batch = 8 / factors;  ///< pieces of 32 summands that are loaded together
  using Batch = uint4[batch][factors];

  const GemmCall& call;
  const int warp, lane;
  const int pieces;   ///< the warp's, of a row
  const int batches;  ///< of a group of rows

  __device__ __forceinline__ explicit WeightStream(const GemmCall& call_)
      : call(call_),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        pieces((static_cast<int>(call_.problem.k) + 32 * warps - 1) / (32 * warps)),
        batches((pieces + batch - 1) / batch) {}

  /// The lane's first summand of a piece.
  __device__ __forceinline__ int summand(int piece) const {
    return (piece * warps + warp) * 32 + lane % 4 * 8;
  }

  __device__ __forceinline__ void load(Batch& to, int group, int number) const {
    const std::int64_t row = static_cast<std::int64_t>(group) * 8 + lane / 4;
#pragma unroll
    for (int f = 0; f < factors; ++f) {
      const Matrix& factor = gated && f == 0 ? call.gate : call.b;
      const auto* from = reinterpret_cast<const T*>(factor.data) + row * factor.stride_row;
#pragma unroll
      for (int n = 0; n < batch; ++n) {
        const int k = summand(number * batch + n);
        to[n][f] = uint4{};
        if (row < call.problem.n && k < call.problem.k)
          to[n][f] = __ldcs(reinterpret_cast<const uint4*>(from + k));
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[factors][4], const Batch& weights, int number,
                                           const std::byte* tokens_smem) const {
    const auto m = static_cast<int>(call.problem.m), k_end = static_cast<int>(call.problem.k);
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      const int k = summand(number * batch + n);
      uint4 x{};
      if (lane / 4 < m && k < k_end) {
        x = *reinterpret_cast<const uint4*>(tokens_smem + lane / 4 * (k_end * 2 + 16) + k * 2);
      }
      const std::uint32_t first[4] = {x.x, 0, x.y, 0}, second[4] = {x.z, 0, x.w, 0};
#pragma unroll
      for (int f = 0; f < factors; ++f) {
        multiply_matrices<T>(sums[f], first, weights[n][f].x, weights[n][f].y);
        multiply_matrices<T>(sums[f], second, weights[n][f].z, weights[n][f].w);
      }
    }
  }
};

template <typename T, bool gated>
__global__ void __launch_bounds__(stream_threads, 1)
    stream_kernel(const __grid_constant__ StreamArguments arguments) {
  using Stream = WeightStream<T, gated>;
  extern __shared__ __align__(16) std::byte tokens_smem[];
  __shared__ float of_warps[2][Stream::warps][Stream::factors][64];
  const GemmCall& call = arguments.call;
  const Stream stream(call);
  const auto blocks = static_cast<std::int64_t>(gridDim.x);
  const int begin = static_cast<int>(arguments.groups * static_cast<std::int64_t>(blockIdx.x) / blocks);
  const int end = static_cast<int>(arguments.groups * (static_cast<std::int64_t>(blockIdx.x) + 1) / blocks);

  typename Stream::Batch next;
  stream.load(next, begin, 0);  // nothing that the kernel ahead writes
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  const auto k = static_cast<int>(call.problem.k);
  for (int index = static_cast<int>(threadIdx.x); index < static_cast<int>(call.problem.m) * (k / 8);
       index += stream_threads) {
    const int token = index / (k / 8), chunk = index % (k / 8);
    *reinterpret_cast<uint4*>(tokens_smem + token * (k * 2 + 16) + chunk * 16) =
        *reinterpret_cast<const uint4*>(call.a.data + token * call.a.stride_row * 2 + chunk * 16);
  }
  __syncthreads();  // tokens are there

#pragma unroll 1
  for (int group = begin; group < end; ++group) {
    float sums[Stream::factors][4] = {};
#pragma unroll 1
    for (int number = 0; number < stream.batches; ++number) {
      typename Stream::Batch now;
#pragma unroll
      for (int n = 0; n < Stream::batch * Stream::factors; ++n) {
        now[n / Stream::factors][n % Stream::factors] = next[n / Stream::factors][n % Stream::factors];
      }
      const bool last = number + 1 == stream.batches;
      if (!last || group + 1 < end) stream.load(next, last ? group + 1 : group, last ? 0 : number + 1);
      stream.multiply(sums, now, number, tokens_smem);
    }
    // Tokens g and rows 2t, 2t + 1 of the group; what a sums of two groups before was read.
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
