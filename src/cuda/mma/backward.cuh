#pragma once

#include "cuda/mma/backward_pairs.cuh"
#include "cuda/mma/backward_sums.cuh"

namespace tilewise::cuda::mma {

// Backward on tensor cores by mma.sync. A block keeps a tile of keys and walks over the queries that see it:
// k·qᵀ and v·d_oᵀ again, weights and score gradients of them, and from those dv, dk and dq. dk and dv are
// summed in registers; dq is added to global memory as it comes: in whatever order, or by turns of the blocks
// where it is to be the same each time.
//
// A warp that has keys for itself takes pairs from registers into dv and dk; where keys are shared, they go by
// way of shared memory, so that a fragment of d_o or q serves more keys.

/// What the pairs of a tile of queries add to all gradients.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void add_pairs(Block& block, const QuerySteps& steps, int stage) {
  const typename Block::Queries queries = block.queries_of(steps);
  const bool edge = queries.count - 1 + queries.low > 0 || min(queries.high, block.key_count) < c.keys;
  constexpr int queries_each = c.queries / (c.warps / c.key_warps);
  const int own_first = block.warp % (c.warps / c.key_warps) * queries_each;
#pragma unroll 1
  for (int n = 0; n < queries_each; n += c.queries_at_once) {
    differentiate<c>(block, steps, queries, edge, stage, own_first + n);
  }
  __syncthreads();  // score gradients are there
  if constexpr (!c.weights_stay) add_to_keys<c>(block, stage);
  add_to_queries<c>(block, QuerySteps{opaque(steps.at), opaque(steps.head)});
}

template <BackwardConfig c, typename Block>
__device__ __forceinline__ void walk(Block& block) {
  for (int r = static_cast<int>(threadIdx.x); r < c.keys; r += c.threads()) block.has_peak_smem[r] = 0;
  if (threadIdx.x == 0) {
    *block.facts_smem = GroupFacts(block.call, block.blocks, block.space.dq, block.b, block.h,
                                   block.first_key, block.key_count);
    *block.turn_smem = {};
  }
  __syncthreads();  // the facts are there
  const GroupFacts& facts = *block.facts_smem;
  QuerySteps steps = QuerySteps::first(facts);
  block.settle(steps);
  if (!steps.more(facts)) return;
  block.load_keys();
  block.load_queries(steps, 0);
  commit_copies();
#pragma unroll 1
  for (int stage = 0; steps.more(facts); stage ^= 1) {
    wait_copies<0>();
    __syncthreads();  // the tile is there, and everyone is done with the last one and its score gradients
    if (block.space.order.kept()) end_turn(block);
    QuerySteps next = steps;
    next.step(facts);
    block.settle(next);
    if (next.more(facts)) block.load_queries(next, stage ^ 1);
    commit_copies();
    add_pairs<c>(block, steps, stage);
    steps = next;
  }
}

/// Which block of keys this one takes. Blocks that wait for each other take them in the order in which they
/// begin.
__device__ __forceinline__ std::uint32_t block_index(const Order& order, BlockFacts& facts_smem) {
  if (!order.kept()) return blockIdx.x;
  if (threadIdx.x == 0) facts_smem.index = atomicAdd(order.ticket, 1u);
  __syncthreads();  // it is there
  return facts_smem.index;
}

/// The kernel of one row of a table.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    backward_kernel(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardBlocks blocks,
                    const __grid_constant__ BackwardSpace space) {
#if __CUDA_ARCH__ >= 800
  constexpr BackwardConfig c = Table::rows[row];
  extern __shared__ __align__(128) std::byte shared[];
  using Block = BackwardBlock<T, c, Table::general>;
  const Turn turn = blocks.turns.turn(block_index(space.order, *Block::facts_of(shared)));
  Block block(call, blocks, space, shared, turn);
  if (block.key_count <= 0) return;
  walk<c>(block);
  __syncthreads();  // everyone is done with keys and values, and peaks are known
  if (space.order.kept()) end_turn(block);
  store_own<c>(block);
#endif
}

}  // namespace tilewise::cuda::mma
