#pragma once

#include "cuda/attention/sm90/forward/output.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::wgmma {

// The last step of split-KV: each split has left a partial O and its LSE.

inline constexpr int combine_warps = 4;

/// Combines the splits of a row. One warp per row; lane n has the LSE of split n.
template <typename T>
__global__ void __launch_bounds__(combine_warps * 32)
    combine_splits_kernel(const __grid_constant__ ForwardArguments arguments, int heads_q,
                          std::int64_t head_rows) {
  const DecodeArguments& decode = arguments.decode;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * combine_warps + threadIdx.x / 32;
  if (row >= decode.rows) return;
  const std::int64_t s = row % head_rows;
  const std::int64_t h = row / head_rows % heads_q;
  const std::int64_t b = row / head_rows / heads_q;
  wait_for_previous_kernel();

  const float own = lane < decode.splits
                        ? reinterpret_cast<const float*>(decode.lse.data)[lane * decode.rows + row]
                        : minus_infinity;
  const float most = maximum_over<32>(own);
  const bool something = most > minus_infinity;
  const float weight = something ? expf(own - most) : 0.0f;
  const float sum = warp_sum(weight);
  float lse = something ? most + logf(sum) : minus_infinity;
  float inverse = something ? 1.0f / sum : 0.0f;
  const HeadValues& sinks = arguments.general.sinks;
  if (sinks.data != nullptr) inverse *= join_sink(static_cast<float>(sinks.at(b, h)), lse);
  if (lane == 0 && arguments.lse.wanted) *reinterpret_cast<float*>(arguments.lse.at(b, h, s)) = lse;

  const float* const o = reinterpret_cast<const float*>(decode.o.data) + row * decode.o.stride_s;
  T* const to = reinterpret_cast<T*>(arguments.o.at(b, h, s));
  const float factor = weight * inverse;
  for (int d = lane; d < (arguments.dim_v + 31) / 32 * 32; d += 32) {
    const bool inside = d < arguments.dim_v;
    float value = 0;
#pragma unroll 4
    for (int n = 0; n < decode.splits; ++n) {
      const float own_factor = __shfl_sync(~0u, factor, n);
      // A split without keys has written no partial O.
      if (own_factor > 0 && inside)
        value = fmaf(own_factor, o[n * decode.rows * decode.o.stride_s + d], value);
    }
    if (inside) to[d] = narrow<T>(value);
  }
}

template <typename T>
void combine_splits(const AttentionCall& call, const ForwardArguments& arguments, const Context& context) {
  const std::int64_t head_rows = call.packed() ? call.total_q : call.problem.length_q;
  launch<combine_splits_kernel<T>>({.name = "tilewise wgmma join",
                                    .blocks = (arguments.decode.rows + combine_warps - 1) / combine_warps,
                                    .threads = combine_warps * 32,
                                    .stream = static_cast<cudaStream_t>(context.stream),
                                    .early = true},
                                   arguments, static_cast<int>(call.problem.heads_q), head_rows);
}

}  // namespace tilewise::cuda::wgmma
