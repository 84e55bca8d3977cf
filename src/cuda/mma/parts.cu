#include "cuda/mma/parts.h"

#include "cuda/runtime/launch.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda::mma {
namespace {

constexpr int threads = 128;
static_assert(most_parts <= threads);

// Over the block, `smem` being a float a warp.
template <typename Join>
__device__ __forceinline__ float join_block(float x, float* smem, const Join& join) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x = join(x, __shfl_xor_sync(~0u, x, apart));
  if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
  __syncthreads();
  return join(join(smem[0], smem[1]), join(smem[2], smem[3]));
}

// A row is a block's. A thread weighs one part, then has one of the dims, or several.
__global__ void __launch_bounds__(threads)
    join_parts_kernel(const __grid_constant__ AttentionCall call, const Parts parts) {
  __shared__ float joined_smem[3][threads / 32];
  __shared__ float weights_smem[threads];
  const auto index = std::int64_t{blockIdx.x};
  const std::int64_t i = index % call.problem.length_q;
  const std::int64_t h = index / call.problem.length_q % call.problem.heads_q;
  const std::int64_t b = index / call.problem.length_q / call.problem.heads_q;
  const Sequence sequence = call.sequence(b);
  if (i >= sequence.length_q) return;
  const std::int64_t row = Parts::row(call, b, h, i);

  const auto own = static_cast<int>(threadIdx.x);
  const bool has_part = own < parts.count;
  const float* state = parts.state(has_part ? own : 0, row);
  const float own_maximum = state[0];
  const auto larger = [](float x, float y) { return fmaxf(x, y); };
  const auto sum_of = [](float x, float y) { return x + y; };
  float maximum = join_block(own_maximum, joined_smem[0], larger);
  float sink_weight = 0;
  if (call.problem.features.sinks) {
    const auto sink = static_cast<float>(call.sinks.at(b, h));
    maximum = fmaxf(maximum, sink);
    sink_weight = expf(sink - maximum);
  }
  // The sink may dwarf every weight, so that all of o hangs on this factor: not the approximate one.
  const float weight = has_part ? expf(own_maximum - maximum) : 0.0f;
  weights_smem[own] = weight;
  const float total = join_block(weight * state[1], joined_smem[1], sum_of) + sink_weight;
  const float rounded = join_block(weight * state[2], joined_smem[2], sum_of) + sink_weight;
  const std::int64_t at = sequence.first_q + i;
  if (call.lse.wanted && own == 0) {
    *reinterpret_cast<float*>(call.lse.at(b, h, at)) = total == 0 ? minus_infinity : maximum + logf(total);
  }
  const float keep_scale = call.problem.features.dropout ? call.dropout.keep_scale : 1.0f;
  const float inverse = rounded == 0 ? 0.0f : keep_scale / rounded;
  std::byte* out = call.o.at(b, h, at);
  for (int d = own; d < parts.dim_v; d += threads) {
    float sum = 0;
#pragma unroll 8
    for (int part = 0; part < parts.count; ++part) {
      sum = fmaf(weights_smem[part], parts.o(part, row)[d], sum);
    }
    store_element(out + d * size_of(call.o.dtype), call.o.dtype, sum * inverse);
  }
}

}  // namespace

void join_parts(const AttentionCall& call, const Parts& parts, void* stream) {
  launch<join_parts_kernel>({.name = "tilewise mma forward, joining parts of keys",
                             .blocks = call.problem.batch * call.problem.heads_q * call.problem.length_q,
                             .threads = threads,
                             .stream = static_cast<cudaStream_t>(stream)},
                            call, parts);
}

}  // namespace tilewise::cuda::mma
