#pragma once

#include "cuda/attention/sm80/backward/pairs.cuh"
#include "cuda/attention/sm80/backward/sums.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/dynamic_shared.cuh"

namespace tilewise::cuda::mma {

// Backward on tensor cores by mma.sync. A block keeps a tile of keys and walks over the queries that see it:
// k·qᵀ and v·d_oᵀ again, weights and score gradients of them, and from those dv, dk and dq. dk and dv are
// summed in registers; dq is added to global memory as it comes: in whatever order, or by turns of the blocks
// where it is to be the same each time.
//
// A warp that has keys for itself takes pairs from registers into dv and dk; where keys are shared, they go
// by way of shared memory, so that a fragment of d_o or q serves more keys.

/// Weights and score gradients of a tile of queries.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void make_pairs(Block& block, const QuerySteps& steps, int stage, int pair_stage) {
  const bool edge = block.edge(steps);
  constexpr int queries_each = c.queries / (c.warps / c.key_warps);
  const int own_first = block.warp % (c.warps / c.key_warps) * queries_each;
#pragma unroll 1
  for (int n = 0; n < queries_each; n += c.queries_at_once) {
    differentiate<c>(block, steps, edge, stage, pair_stage, own_first + n);
  }
}

/// A tile after another: its pairs, then what they add.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void walk(Block& block, QuerySteps steps) {
  block.load_queries(steps, 0);
  commit_copies();
#pragma unroll 1
  for (int stage = 0; steps.more(); stage ^= 1) {
    wait_copies<0>();
    __syncthreads();  // the tile is there, and everyone is done with the last one and its score gradients
    if (block.space.order.kept()) end_turn(block);  // of the last tile
    const QuerySteps next = block.after(steps);
    if (next.more()) block.load_queries(next, stage ^ 1);
    commit_copies();
    make_pairs<c>(block, steps, stage, 0);
    __syncthreads();  // weights and score gradients are there
    if constexpr (!c.weights_stay) add_to_keys<c>(block, steps, stage, 0);
    add_to_queries<c>(block, steps, 0);
    steps = next;
  }
}

/// The same with pairs a tile ahead. Half of the warps make them first, the others sum first: so that what
/// one of a scheduler's two warps computes between its products runs beside the other's products. With two
/// stages, rows are needed for dv and dk alone when the next are to come, so these go first.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void walk_ahead(Block& block, QuerySteps next) {
  static_assert(!c.weights_stay);
  block.load_queries(next, 0);
  commit_copies();
  QuerySteps now{};          // none yet
  int stage = c.stages - 1;  // of those
  int pair_stage = 1;
#pragma unroll 1
  while (now.more() || next.more()) {
    wait_copies<0>();
    // The next tile and this one's pairs are there, and everyone is done with the last one and its pairs.
    __syncthreads();
    if (block.space.order.kept()) end_turn(block);  // of the last tile
    const int next_stage = stage == c.stages - 1 ? 0 : stage + 1;
    const int later_stage = next_stage == c.stages - 1 ? 0 : next_stage + 1;
    const QuerySteps later = next.more() ? block.after(next) : next;
    if constexpr (c.stages == 2) {
      if (now.more()) add_to_keys<c>(block, now, stage, pair_stage);
      __syncthreads();  // everyone is done with this tile's rows and weights
      if (later.more()) block.load_queries(later, later_stage);
      commit_copies();
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      // What is made of these is made here, and not ahead of the loop.
      const bool making = (half == 0) == (block.warp < c.warps / 2);
      const QuerySteps own = making ? next : now;
      const QuerySteps loaded = making ? now : later;
      if (making) {
        if (own.more()) make_pairs<c>(block, own, next_stage, pair_stage ^ 1);
        continue;
      }
      if constexpr (c.stages > 2) {
        // Not by all warps at once: the others multiply.
        if (loaded.more()) block.load_queries(loaded, later_stage);
        commit_copies();
        if (own.more()) add_to_keys<c>(block, own, stage, pair_stage);
      }
      if (own.more()) add_to_queries<c>(block, own, pair_stage);
    }
    now = next;
    next = later;
    stage = next_stage;
    pair_stage ^= 1;
  }
}

/// All that the queries add.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void add_all(Block& block, int share) {
  if (threadIdx.x == 0) {
    *block.facts_smem = GroupFacts::of<c.queries, c.keys>(block.call, block.blocks, block.space, block.b,
                                                          block.h, block.first_key, block.key_count, share);
    *block.turn_smem = {};
  }
  __syncthreads();  // the facts are there
  const QuerySteps steps = block.begin();
  if (!steps.more()) return;
  block.load_keys();
  if constexpr (c.pairs_ahead) {
    walk_ahead<c>(block, steps);
  } else {
    walk<c>(block, steps);
  }
}

/// Which block of keys this one takes, and which share of their queries. Blocks that wait for each other take
/// them in the order in which they begin.
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
  if constexpr (runs_in_code(c.shared_bytes(Table::general))) {
    TILEWISE_DYNAMIC_SHARED(std::byte, shared, 128);
    take_turn_in_chain();
    using Block = BackwardBlock<T, c, Table::general>;
    const std::uint32_t index = block_index(space.order, *Block::facts_of(shared));
    const auto shares = static_cast<std::uint32_t>(space.shares.count);
    const Turn turn = blocks.turns.turn(index / shares);
    Block block(call, blocks, space, shared, turn);
    if (block.key_count <= 0) return;
    add_all<c>(block, static_cast<int>(index % shares));
    __syncthreads();  // everyone is done with keys and values
    if (space.order.kept()) end_turn(block);
    space.shares.count > 1 ? store_shares<c>(block) : store_own<c>(block);
  }
#endif
}

}  // namespace tilewise::cuda::mma
