#include "cuda/attention/sm80/forward/split_kv.h"

#include "cuda/attention/common/score.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::mma {
namespace {

constexpr int threads = 128;
static_assert(most_splits <= threads);

// Reduces over the CTA; `smem` has one float per warp.
template <typename Join>
__device__ __forceinline__ float reduce_cta(float x, float* smem, const Join& join) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x = join(x, __shfl_xor_sync(~0u, x, apart));
  if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
  __syncthreads();  // the results of all warps are there
  return join(join(smem[0], smem[1]), join(smem[2], smem[3]));
}

// Sums the partial O of a row, four dims per thread. Threads with the same dims share the splits. The first
// loads are issued before the splits' weights are known. `used` says whether rows are multiples of four dims.
struct RowSums {
  static constexpr int ahead = 4;
  const Splits& splits;
  const std::int64_t row;
  const int columns, d, first, step;  // step: how many threads have the same dims
  const bool active;
  float4 early[ahead];

  __device__ __forceinline__ RowSums(const Splits& splits_, std::int64_t row_, bool used)
      : splits(splits_),
        row(row_),
        columns(used ? static_cast<int>(splits_.dim_v) / 4 : threads),
        d(static_cast<int>(threadIdx.x) % columns * 4),
        first(static_cast<int>(threadIdx.x) / columns),
        step(threads / columns),
        active(used && first < step) {
#pragma unroll
    for (int n = 0; n < ahead; ++n) early[n] = split(first + n * step);
  }
  __device__ __forceinline__ float4 split(int index) const {
    return active && index < splits.count ? *reinterpret_cast<const float4*>(splits.o(index, row) + d)
                                          : float4{};
  }
  __device__ __forceinline__ static void add(float4& sum, float weight, const float4& more) {
    sum.x = fmaf(weight, more.x, sum.x);
    sum.y = fmaf(weight, more.y, sum.y);
    sum.z = fmaf(weight, more.z, sum.z);
    sum.w = fmaf(weight, more.w, sum.w);
  }
  /// The weighted sum over all splits.
  __device__ __forceinline__ float4 sum(const float* weights_smem, float4* sums_smem) const {
    float4 own{};
#pragma unroll
    for (int n = 0; n < ahead; ++n) {
      if (first + n * step < splits.count) add(own, weights_smem[first + n * step], early[n]);
    }
#pragma unroll 8
    for (int index = first + ahead * step; index < splits.count; index += step) {
      add(own, weights_smem[index], split(index));
    }
    sums_smem[threadIdx.x] = own;
    __syncthreads();  // the sums of all threads are there
    float4 all{};
    for (int n = 0; n < step; ++n) add(all, 1.0f, sums_smem[d / 4 + n * columns]);
    return all;
  }
};

// One CTA per row. A thread computes the weight of one split, then sums some of the dims.
template <bool by_fours>
__global__ void __launch_bounds__(threads)
    combine_kernel(const __grid_constant__ AttentionCall call, const Splits splits) {
  __shared__ float joined_smem[3][threads / 32];
  __shared__ float weights_smem[threads];
  __shared__ float4 sums_smem[threads];
  let_next_kernel_start();
  wait_for_previous_kernel();  // it wrote the partial results
  const auto length_q = static_cast<std::uint32_t>(call.problem.length_q);
  const auto heads_q = static_cast<std::uint32_t>(call.problem.heads_q);
  const std::int64_t i = blockIdx.x % length_q;
  const std::int64_t h = blockIdx.x / length_q % heads_q;
  const std::int64_t b = blockIdx.x / length_q / heads_q;
  const Sequence sequence = call.sequence(b);
  if (i >= sequence.length_q) return;
  const std::int64_t row = Splits::row(call, b, h, i);

  const RowSums row_sums(splits, row, by_fours);
  const auto own = static_cast<int>(threadIdx.x);
  const bool has_split = own < splits.count;
  const float* state = splits.state(has_split ? own : 0, row);
  const float own_maximum = state[0];
  const auto larger = [](float x, float y) { return fmaxf(x, y); };
  const auto sum_of = [](float x, float y) { return x + y; };
  float maximum = reduce_cta(own_maximum, joined_smem[0], larger);
  float sink_p = 0;
  if (call.problem.features.sinks) {
    join_sink(static_cast<float>(call.sinks.at(b, h)), maximum, sink_p);
  }
  const float weight = has_split ? expf(own_maximum - maximum) : 0.0f;
  weights_smem[own] = weight;
  const float total = reduce_cta(weight * state[1], joined_smem[1], sum_of) + sink_p;
  const float rounded = reduce_cta(weight * state[2], joined_smem[2], sum_of) + sink_p;
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
  if constexpr (by_fours) {
    const float4 sum = row_sums.sum(weights_smem, sums_smem);
    if (row_sums.first > 0) return;
    store(row_sums.d, sum.x);
    store(row_sums.d + 1, sum.y);
    store(row_sums.d + 2, sum.z);
    store(row_sums.d + 3, sum.w);
  } else {
    for (int d = own; d < splits.dim_v; d += threads) {
      float sum = 0;
#pragma unroll 8
      for (int split = 0; split < splits.count; ++split) {
        sum = fmaf(weights_smem[split], splits.o(split, row)[d], sum);
      }
      store(d, sum);
    }
  }
}

}  // namespace

void combine_splits(const AttentionCall& call, const Splits& splits, void* stream) {
  const Launch how{.name = "tilewise mma forward, combining splits",
                   .blocks = call.problem.batch * call.problem.heads_q * call.problem.length_q,
                   .threads = threads,
                   .stream = static_cast<cudaStream_t>(stream),
                   .early = has_pdl(call.problem.device)};
  splits.dim_v % 4 == 0 && splits.dim_v / 4 <= threads ? launch<combine_kernel<true>>(how, call, splits)
                                                       : launch<combine_kernel<false>>(how, call, splits);
}

}  // namespace tilewise::cuda::mma
