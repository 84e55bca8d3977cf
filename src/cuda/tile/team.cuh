#pragma once

namespace tilewise::cuda {

// Reductions over the threads that share a row: some lanes of a warp, a warp, or a whole CTA.

/// The sum over `lanes` lanes, a power of two, at a distance of `stride`. All of them get it.
template <int lanes, int stride = 1, typename T>
__device__ __forceinline__ T sum_over(T x) {
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart * stride);
  return x;
}
/// The maximum, in the same way.
template <int lanes, int stride = 1>
__device__ __forceinline__ float maximum_over(float x) {
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart * stride));
  return x;
}
__device__ __forceinline__ float warp_sum(float value) { return sum_over<32>(value); }

/// The threads that share a row: a warp, or the whole CTA.
template <bool one_warp>
struct Team {
  __device__ __forceinline__ static int size() { return one_warp ? 32 : static_cast<int>(blockDim.x); }
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(one_warp ? threadIdx.x % 32 : threadIdx.x);
  }
  __device__ __forceinline__ static int per_block() {
    return one_warp ? static_cast<int>(blockDim.x) / 32 : 1;
  }
  /// The team's number, and the number of teams, over all CTAs.
  __device__ __forceinline__ static long long number() {
    return static_cast<long long>(blockIdx.x) * per_block() + (one_warp ? threadIdx.x / 32 : 0);
  }
  __device__ __forceinline__ static long long count() {
    return static_cast<long long>(gridDim.x) * per_block();
  }

  /// The team's sum of each value; all threads of the team get it. Consecutive calls alternate between places
  /// 0 and 1: the barrier of the call between has then ensured that all threads have read a place before it
  /// is overwritten.
  template <int count>
  __device__ __forceinline__ static void sum(float (&values)[count], int place) {
#pragma unroll
    for (int n = 0; n < count; ++n) values[n] = warp_sum(values[n]);
    if constexpr (!one_warp) {
      __shared__ float of_warps[2][count][32];
      const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
      const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll
      for (int n = 0; n < count; ++n) {
        if (lane == 0) of_warps[place][n][warp] = values[n];
      }
      __syncthreads();  // all warps have stored their sums
#pragma unroll
      for (int n = 0; n < count; ++n) values[n] = warp_sum(lane < warps ? of_warps[place][n][lane] : 0.0f);
    }
  }
};

}  // namespace tilewise::cuda
