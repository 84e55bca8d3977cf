#include "cuda/attention/sm80/forward/parts.h"

#include "cuda/attention/common/score.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/element.cuh"

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

// Sums of values of a row, four dims a thread, where rows lie in such pieces: threads that have the same dims
// share the parts. The first are on their way before anyone knows what they weigh.
struct Pieces {
  static constexpr int ahead = 4;
  const Parts& parts;
  const std::int64_t row;
  const int columns, d, first, step;  // step: how many threads have the same dims
  const bool works;
  float4 early[ahead];

  __device__ __forceinline__ Pieces(const Parts& parts_, std::int64_t row_, bool used)
      : parts(parts_),
        row(row_),
        columns(used ? static_cast<int>(parts_.dim_v) / 4 : threads),
        d(static_cast<int>(threadIdx.x) % columns * 4),
        first(static_cast<int>(threadIdx.x) / columns),
        step(threads / columns),
        works(used && first < step) {
#pragma unroll
    for (int n = 0; n < ahead; ++n) early[n] = part(first + n * step);
  }
  __device__ __forceinline__ float4 part(int index) const {
    return works && index < parts.count ? *reinterpret_cast<const float4*>(parts.o(index, row) + d)
                                        : float4{};
  }
  __device__ __forceinline__ static void add(float4& sum, float weight, const float4& more) {
    sum.x = fmaf(weight, more.x, sum.x);
    sum.y = fmaf(weight, more.y, sum.y);
    sum.z = fmaf(weight, more.z, sum.z);
    sum.w = fmaf(weight, more.w, sum.w);
  }
  /// The weighted sum.
  __device__ __forceinline__ float4 sum(const float* weights_smem, float4* sums_smem) const {
    float4 own{};
#pragma unroll
    for (int n = 0; n < ahead; ++n) {
      if (first + n * step < parts.count) add(own, weights_smem[first + n * step], early[n]);
    }
#pragma unroll 8
    for (int index = first + ahead * step; index < parts.count; index += step) {
      add(own, weights_smem[index], part(index));
    }
    sums_smem[threadIdx.x] = own;
    __syncthreads();  // all sums are there
    float4 all{};
    for (int n = 0; n < step; ++n) add(all, 1.0f, sums_smem[d / 4 + n * columns]);
    return all;
  }
};

// A row is a block's. A thread weighs one part, then has some of the dims.
template <bool in_pieces>
__global__ void __launch_bounds__(threads)
    join_parts_kernel(const __grid_constant__ AttentionCall call, const Parts parts) {
  __shared__ float joined_smem[3][threads / 32];
  __shared__ float weights_smem[threads];
  __shared__ float4 sums_smem[threads];
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  const auto length_q = static_cast<std::uint32_t>(call.problem.length_q);
  const auto heads_q = static_cast<std::uint32_t>(call.problem.heads_q);
  const std::int64_t i = blockIdx.x % length_q;
  const std::int64_t h = blockIdx.x / length_q % heads_q;
  const std::int64_t b = blockIdx.x / length_q / heads_q;
  const Sequence sequence = call.sequence(b);
  if (i >= sequence.length_q) return;
  const std::int64_t row = Parts::row(call, b, h, i);

  const Pieces pieces(parts, row, in_pieces);
  const auto own = static_cast<int>(threadIdx.x);
  const bool has_part = own < parts.count;
  const float* state = parts.state(has_part ? own : 0, row);
  const float own_maximum = state[0];
  const auto larger = [](float x, float y) { return fmaxf(x, y); };
  const auto sum_of = [](float x, float y) { return x + y; };
  float maximum = join_block(own_maximum, joined_smem[0], larger);
  float sink_weight = 0;
  if (call.problem.features.sinks) {
    join_sink(static_cast<float>(call.sinks.at(b, h)), maximum, sink_weight);
  }
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
  const auto store = [&](int d, float sum) {
    store_element(out + d * size_of(call.o.dtype), call.o.dtype, sum * inverse);
  };
  if constexpr (in_pieces) {
    const float4 sum = pieces.sum(weights_smem, sums_smem);
    if (pieces.first > 0) return;
    store(pieces.d, sum.x);
    store(pieces.d + 1, sum.y);
    store(pieces.d + 2, sum.z);
    store(pieces.d + 3, sum.w);
  } else {
    for (int d = own; d < parts.dim_v; d += threads) {
      float sum = 0;
#pragma unroll 8
      for (int part = 0; part < parts.count; ++part) {
        sum = fmaf(weights_smem[part], parts.o(part, row)[d], sum);
      }
      store(d, sum);
    }
  }
}

}  // namespace

void join_parts(const AttentionCall& call, const Parts& parts, void* stream) {
  const Launch how{.name = "tilewise mma forward, joining parts of keys",
                   .blocks = call.problem.batch * call.problem.heads_q * call.problem.length_q,
                   .threads = threads,
                   .stream = static_cast<cudaStream_t>(stream),
                   .early = begins_early(call.problem.device)};
  parts.dim_v % 4 == 0 && parts.dim_v / 4 <= threads ? launch<join_parts_kernel<true>>(how, call, parts)
                                                     : launch<join_parts_kernel<false>>(how, call, parts);
}

}  // namespace tilewise::cuda::mma
