#pragma once

#include "cuda/attention/sm90/forward/output.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::wgmma {

// Where the keys of a tile of queries were cut into shares, each has left o and lse of its own.

inline constexpr int joining_warps = 4;

/// Joins a row's shares, a warp for each: lane n has the lse of share n.
template <typename T>
__global__ void __launch_bounds__(joining_warps * 32)
    join_shares_kernel(const __grid_constant__ ForwardArguments arguments, int heads_q,
                       std::int64_t head_rows) {
  const FewArguments& few = arguments.few;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * joining_warps + threadIdx.x / 32;
  if (row >= few.rows) return;
  const std::int64_t s = row % head_rows;
  const std::int64_t h = row / head_rows % heads_q;
  const std::int64_t b = row / head_rows / heads_q;
  wait_for_kernel_ahead();

  const float own = lane < few.shares ? reinterpret_cast<const float*>(few.lse.data)[lane * few.rows + row]
                                      : minus_infinity;
  float most = own;
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
  const bool something = most > minus_infinity;
  const float weight = something ? expf(own - most) : 0.0f;
  float sum = weight;
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  float lse = something ? most + logf(sum) : minus_infinity;
  float inverse = something ? 1.0f / sum : 0.0f;
  const HeadValues& sinks = arguments.general.sinks;
  if (sinks.data != nullptr) inverse *= join_sink(static_cast<float>(sinks.at(b, h)), lse);
  if (lane == 0 && arguments.lse.wanted) *reinterpret_cast<float*>(arguments.lse.at(b, h, s)) = lse;

  const float* const o = reinterpret_cast<const float*>(few.o.data) + row * few.o.stride_s;
  T* const to = reinterpret_cast<T*>(arguments.o.at(b, h, s));
  const float share_weight = weight * inverse;
  for (int d = lane; d < (arguments.dim_v + 31) / 32 * 32; d += 32) {
    const bool inside = d < arguments.dim_v;
    float value = 0;
#pragma unroll 4
    for (int n = 0; n < few.shares; ++n) {
      const float part = __shfl_sync(~0u, share_weight, n);
      // Nothing was written where a share saw nothing.
      if (part > 0 && inside) value = fmaf(part, o[n * few.rows * few.o.stride_s + d], value);
    }
    if (inside) to[d] = narrow<T>(value);
  }
}

template <typename T>
void join_shares(const AttentionCall& call, const ForwardArguments& arguments, const Context& context) {
  const std::int64_t head_rows = call.packed() ? call.total_q : call.problem.length_q;
  launch<join_shares_kernel<T>>({.name = "tilewise wgmma join",
                                 .blocks = (arguments.few.rows + joining_warps - 1) / joining_warps,
                                 .threads = joining_warps * 32,
                                 .stream = static_cast<cudaStream_t>(context.stream),
                                 .early = true},
                                arguments, static_cast<int>(call.problem.heads_q), head_rows);
}

}  // namespace tilewise::cuda::wgmma
