#include "cuda/mma/parts.h"

#include "cuda/runtime/launch.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda::mma {
namespace {

constexpr int warps = 4;

__device__ __forceinline__ float warp_maximum(float x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

// A row is a warp's. A lane weighs one part, then has some of the dims.
__global__ void __launch_bounds__(warps * 32)
    join_parts_kernel(const __grid_constant__ AttentionCall call, const Parts parts, std::int64_t count) {
  const std::int64_t index = std::int64_t{blockIdx.x} * warps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (index >= count) return;
  const std::int64_t i = index % call.problem.length_q;
  const std::int64_t h = index / call.problem.length_q % call.problem.heads_q;
  const std::int64_t b = index / call.problem.length_q / call.problem.heads_q;
  const Sequence sequence = call.sequence(b);
  if (i >= sequence.length_q) return;
  const std::int64_t row = Parts::row(call, b, h, i);

  const bool has_part = lane < parts.count;
  const float* state = parts.state(has_part ? lane : 0, row);
  const float own_maximum = state[0];
  float maximum = warp_maximum(own_maximum);
  float sink_weight = 0;
  if (call.problem.features.sinks) {
    const auto sink = static_cast<float>(call.sinks.at(b, h));
    maximum = fmaxf(maximum, sink);
    sink_weight = expf(sink - maximum);
  }
  // The sink may dwarf every weight, so that all of o hangs on this factor: not the approximate one.
  const float weight = has_part ? expf(own_maximum - maximum) : 0.0f;
  const float total = warp_sum(weight * state[1]) + sink_weight;
  const float rounded = warp_sum(weight * state[2]) + sink_weight;
  const std::int64_t at = sequence.first_q + i;
  if (call.lse.wanted && lane == 0) {
    *reinterpret_cast<float*>(call.lse.at(b, h, at)) = total == 0 ? minus_infinity : maximum + logf(total);
  }
  const float keep_scale = call.problem.features.dropout ? call.dropout.keep_scale : 1.0f;
  const float inverse = rounded == 0 ? 0.0f : keep_scale / rounded;
  std::byte* out = call.o.at(b, h, at);
  for (int first = 0; first < parts.dim_v; first += 32) {
    const int d = first + lane;
    const bool within = d < parts.dim_v;
    float sum = 0;
    for (int part = 0; part < parts.count; ++part) {
      const float factor = __shfl_sync(~0u, weight, part);
      if (within) sum = fmaf(factor, parts.o(part, row)[d], sum);
    }
    if (within) store_element(out + d * size_of(call.o.dtype), call.o.dtype, sum * inverse);
  }
}

}  // namespace

void join_parts(const AttentionCall& call, const Parts& parts, void* stream) {
  const std::int64_t rows = call.problem.batch * call.problem.heads_q * call.problem.length_q;
  launch<join_parts_kernel>({.name = "tilewise mma forward, joining parts of keys",
                             .blocks = (rows + warps - 1) / warps,
                             .threads = warps * 32,
                             .stream = static_cast<cudaStream_t>(stream)},
                            call, parts, rows);
}

}  // namespace tilewise::cuda::mma
