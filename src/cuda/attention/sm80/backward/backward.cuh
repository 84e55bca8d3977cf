#pragma once

#include "cuda/attention/sm80/backward/backward.h"
#include "cuda/attention/sm80/backward/block.cuh"
#include "cuda/attention/sm80/backward/choice.h"
#include "cuda/attention/sm80/backward/pairs.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma {

// Backward on tensor cores by mma.sync. A block keeps a tile of keys and walks over the queries that see it:
// k·qᵀ and v·d_oᵀ again, weights and score gradients of them, and from those dv, dk and dq. dk and dv are
// summed in registers; dq is added to global memory as it comes: in whatever order, or by one block
// after another where it is to be the same each time.
//
// A warp that has keys for itself takes pairs from registers into dv and dk; where keys are shared, they go
// by way of shared memory, so that a fragment of d_o or q serves more keys.

// What pairs of a tile, which are in shared memory, add to the gradients.

/// dv += weightsᵀ·d_o and dk += dscoresᵀ·q, of the steps' queries.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void add_to_keys(Block& block, const QuerySteps& steps, int stage,
                                            int pair_stage) {
  using T = typename Block::T;
  using RowPointer = typename Block::RowPointer;
  using PairPointer = typename Block::PairPointer;
  constexpr int key_tiles = c.own_key_tiles();
  constexpr int dim_tiles = c.own_dim_tiles();
  const WarpPlace<c.dim_warps> place(block.warp);
  const int first_key = place.m * key_tiles * 16;
  const int first_dim = place.n * dim_tiles;
  const auto address = [](const std::byte* smem) { return Block::address(smem); };
  const auto pairs_at = [&](const std::byte* smem) {
    return a_by_rows<key_tiles>(PairPointer::by_rows(address(smem)).from(first_key, 0));
  };
  multiply_tiles<T, c.queries / 16, key_tiles, dim_tiles>(
      block.dv, pairs_at(block.weights_at(pair_stage)),
      b_transposed(
          RowPointer::by_rows(address(block.d_o_smem + stage * c.query_bytes())).from(0, first_dim)));
  if (!block.adds_dk(steps)) return;
  multiply_tiles<T, c.queries / 16, key_tiles, dim_tiles>(
      block.dk, pairs_at(block.dscores_at(pair_stage)),
      b_transposed(RowPointer::by_rows(address(block.q_smem + stage * c.query_bytes())).from(0, first_dim)));
}

/// Waits until the blocks of the keys before have added to a tile of queries.
template <typename Block>
__device__ __forceinline__ void await_tile(const Block& block, const QuerySteps& steps) {
  if (block.lane == 0) {
    std::uint32_t* flag = block.space.order.done + block.sums_tile(steps);
    const OrderWords words = block.order_words(steps);
    await_flag(flag, words.before);
    if (block.warp == 0) *block.held_smem = {flag, words.after};
  }
  __syncwarp();  // what lane 0 saw is to be seen by the warp
}
/// Lets the block behind add to the last tile: a barrier stands between all that the block added and this.
template <typename Block>
__device__ __forceinline__ void release_tile(const Block& block) {
  if (threadIdx.x != 0 || block.held_smem->flag == nullptr) return;
  raise_flag(block.held_smem->flag, block.held_smem->word);
  block.held_smem->flag = nullptr;
}

/// dq += dscores·k.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void add_to_queries(const Block& block, const QuerySteps& steps, int pair_stage) {
  using T = typename Block::T;
  using RowPointer = typename Block::RowPointer;
  using PairPointer = typename Block::PairPointer;
  constexpr int query_tiles = c.dq_query_tiles();
  constexpr int dim_tiles = c.dq_dim_tiles();
  const BackwardSpace& space = block.space;
  if (space.dq.data == nullptr) return;
  const WarpPlace<c.dq_dim_warps> place(block.warp);
  const int first_query = place.m * query_tiles * 16;
  const int first_dim = place.n * dim_tiles;
  Sums<query_tiles, dim_tiles> dq = {};
  const auto dscores = PairPointer::by_columns(Block::address(block.dscores_at(pair_stage)));
  multiply_tiles<T, c.keys / 16, query_tiles, dim_tiles>(
      dq, a_transposed<query_tiles>(dscores.from(0, first_query / 16)),
      b_transposed(RowPointer::by_rows(Block::address(block.k_smem)).from(0, first_dim)), Nothing{}, [&] {
        if (space.order.kept()) await_tile(block, steps);  // here registers are to be had
      });
  const int rows = block.query_count(steps, block.first_query(steps)) - first_query;
  const std::int64_t tile = block.sums_tile(steps) + first_query / 16;
  float* first_dq =
      space.dq.data + (tile * space.dq.eights + 2 * first_dim) * QuerySums::fragment + 4 * block.lane;
  const int present = space.dq.eights - 2 * first_dim;
  const auto add = [&](int m, int n) {
    const float(&four)[4] = dq[m][n];
    add_4(first_dq + (m * space.dq.eights + n) * QuerySums::fragment, {four[0], four[1], four[2], four[3]});
  };
  if (rows >= 16 * query_tiles && present >= 2 * dim_tiles) {
#pragma unroll
    for (int m = 0; m < query_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * dim_tiles; ++n) add(m, n);
    }
  } else {
#pragma unroll
    for (int m = 0; m < query_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * dim_tiles; ++n) {
        if (16 * m < rows && n < present) add(m, n);
      }
    }
  }
}

/// A lane's sums, times a factor, to a tile in shared memory.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void stage_own(const Block& block, std::byte* to_smem,
                                          const typename Block::OwnSums& sums, float factor) {
  using Tile = typename Block::RowTile;
  const WarpPlace<c.dim_warps> place(block.warp);
  const int first_key = place.m * c.own_key_tiles() * 16 + block.lane / 4;
#pragma unroll
  for (int m = 0; m < c.own_key_tiles(); ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < 2 * c.own_dim_tiles(); ++n) {
        const int chunk = place.n * 2 * c.own_dim_tiles() + n;
        *reinterpret_cast<std::uint32_t*>(to_smem + Tile::offset(first_key + 16 * m + 8 * half, chunk) +
                                          4 * (block.lane % 4)) =
            pack<typename Block::T>(sums[m][n][2 * half] * factor, sums[m][n][2 * half + 1] * factor);
      }
    }
  }
}
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void store_rows(const Block& block, const Rows& rows, int dims,
                                           const std::byte* from_smem) {
  using Tile = typename Block::RowTile;
  if (!rows.wanted) return;
  const bool aligned = !Block::general || aligned_chunks(rows);
  std::byte* first = row_of_halves(rows, block.b, block.h, block.first_key_row());
#pragma unroll 4
  for (int index = static_cast<int>(threadIdx.x); index < c.keys * Tile::chunks; index += c.threads()) {
    const int row = index / Tile::chunks;
    const int chunk = index % Tile::chunks;
    if (row >= block.key_count || chunk * 8 >= dims) continue;
    store_eight(first + row * rows.stride_s * 2, chunk * 8, dims, aligned,
                *reinterpret_cast<const uint4*>(from_smem + Tile::offset(row, chunk)));
  }
}
/// A share's sums of all rows.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void store_share(const Block& block, float* to, int dims,
                                            const typename Block::OwnSums& sums) {
  if (to == nullptr) return;
  const WarpPlace<c.dim_warps> place(block.warp);
  const std::int64_t floats = KeyShares::row_floats(dims);
  const std::int64_t first_row = block.facts_smem->share * block.space.shares.keys +
                                 BackwardSpace::key_row(block.call, block.b, block.h, block.first_key_row());
  const int first_dim = place.n * c.own_dim_tiles() * 16 + 2 * (block.lane % 4);
#pragma unroll
  for (int m = 0; m < c.own_key_tiles(); ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = place.m * c.own_key_tiles() * 16 + 16 * m + 8 * half + block.lane / 4;
      if (r >= block.key_count) continue;
      float* row = to + (first_row + r) * floats + first_dim;
#pragma unroll
      for (int n = 0; n < 2 * c.own_dim_tiles(); ++n) {
        if (first_dim + 8 * n >= floats) continue;
        *reinterpret_cast<float2*>(row + 8 * n) = {sums[m][n][2 * half], sums[m][n][2 * half + 1]};
      }
    }
  }
}
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void store_shares(const Block& block) {
  store_share<c>(block, block.space.shares.dk, block.dim_qk, block.dk);
  store_share<c>(block, block.space.shares.dv, block.dim_v, block.dv);
}

/// dk and dv from their sums; everyone is done with keys and values.
template <BackwardConfig c, typename Block>
__device__ __forceinline__ void store_own(const Block& block) {
  const float weight_unit = block.keep_scale() / static_cast<float>(1 << weight_bits<typename Block::T>);
  stage_own<c>(block, block.k_smem, block.dk, static_cast<float>(block.call.scale) * block.scale.down);
  stage_own<c>(block, block.v_smem, block.dv, weight_unit);
  __syncthreads();  // the rows are there
  store_rows<c>(block, block.call.dk, block.dim_qk, block.k_smem);
  store_rows<c>(block, block.call.dv, block.dim_v, block.v_smem);
}

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
    if (block.space.order.kept()) release_tile(block);  // of the last tile
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
    if (block.space.order.kept()) release_tile(block);  // of the last tile
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
    *block.held_smem = {};
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
    if (space.order.kept()) release_tile(block);
    space.shares.count > 1 ? store_shares<c>(block) : store_own<c>(block);
  }
#endif
}

// From a call to the row of a tuning table that it runs by.

template <typename T, typename Table, int row>
void run_backward_row(const AttentionCall& call, const BackwardSpace& space, int multiprocessors,
                      cudaStream_t stream) {
  constexpr BackwardConfig c = Table::rows[row];
  const BackwardBlocks blocks = BackwardBlocks::of(call, c, multiprocessors);
  launch<backward_kernel<T, Table, row>>({.name = "tilewise mma backward",
                                          .blocks = blocks.count() * space.shares.count,
                                          .threads = c.threads(),
                                          .shared_bytes = c.shared_bytes(Table::general),
                                          .stream = stream,
                                          .early = begins_early(call.problem.device)},
                                         call, blocks, space);
}

/// Runs the chosen row; all of the table is compiled.
template <typename T, typename Table>
void run_chosen_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context,
                         int chosen) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  with_row<Table>(chosen,
                  [&](auto row) { run_backward_row<T, Table, row>(call, space, multiprocessors, stream); });
}

}  // namespace tilewise::cuda::mma
