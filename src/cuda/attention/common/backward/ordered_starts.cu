#include "cuda/attention/common/backward/ordered_starts.h"

#include "core/arena.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::simt {
namespace {

constexpr int order_threads = 512;
constexpr int order_warps = order_threads / 32;

// One CTA for the queries and one for the keys: a running maximum over the starts.
__global__ void __launch_bounds__(order_threads)
    order_starts(const __grid_constant__ AttentionCall call, std::int32_t* to_q, std::int32_t* to_k) {
  __shared__ int highest_smem[order_warps];
  const bool of_queries = blockIdx.x == 0;
  const Starts from = of_queries ? call.starts_q() : call.starts_k();
  std::int32_t* const to = of_queries ? to_q : to_k;  // [sequences + 1]
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int before = 0;  // the maximum of the starts before `first`
  for (std::int64_t first = 0; first <= from.sequences; first += order_threads) {
    const std::int64_t n = first + threadIdx.x;
    int highest = n > 0 && n <= from.sequences ? static_cast<int>(from.at(n)) : 0;  // the first start is 0
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      highest = max(highest, __shfl_up_sync(~0u, highest, apart));  // the lowest lanes get their own
    }
    if (threadIdx.x % 32 == 31) highest_smem[warp] = highest;
    __syncthreads();  // the maxima of all warps are there
    highest = max(highest, before);
    for (int w = 0; w < order_warps; ++w) {
      if (w < warp) highest = max(highest, highest_smem[w]);
      before = max(before, highest_smem[w]);
    }
    if (n <= from.sequences) to[n] = highest;
    __syncthreads();  // the maxima were read
  }
}

struct Copies {
  std::int32_t *q, *k;
  std::size_t bytes;

  Copies(const AttentionCall& call, void* space) {
    Arena arena(space);
    q = arena.take<std::int32_t>(call.problem.batch + 1);
    k = arena.take<std::int32_t>(call.problem.batch + 1);
    bytes = arena.rounded();
  }
};

bool needs_order(const AttentionCall& call) { return call.packed() && call.problem.pass == Pass::backward; }

}  // namespace

std::size_t ordered_starts_bytes(const AttentionCall& call) {
  return needs_order(call) ? Copies(call, nullptr).bytes : 0;
}

AttentionCall with_ordered_starts(const AttentionCall& call, Context& context) {
  if (!needs_order(call)) return call;
  const Copies copies(call, context.workspace.data);
  launch<order_starts>({.name = "tilewise order of sequences",
                        .blocks = 2,
                        .threads = order_threads,
                        .stream = static_cast<cudaStream_t>(context.stream)},
                       call, copies.q, copies.k);
  context.workspace.data = static_cast<std::byte*>(context.workspace.data) + copies.bytes;
  context.workspace.bytes -= copies.bytes;
  AttentionCall ordered = call;
  ordered.cumulative_q = {.data = copies.q, .stride = {1}};
  ordered.cumulative_k = {.data = copies.k, .stride = {1}};
  return ordered;
}

}  // namespace tilewise::cuda::simt
