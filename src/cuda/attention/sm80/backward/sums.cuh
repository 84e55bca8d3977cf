#pragma once

#include "cuda/attention/sm80/backward/block.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/reduce.cuh"

namespace tilewise::cuda::mma {

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
      b_turned(RowPointer::by_rows(address(block.d_o_smem + stage * c.query_bytes())).from(0, first_dim)));
  if (!block.adds_dk(steps)) return;
  multiply_tiles<T, c.queries / 16, key_tiles, dim_tiles>(
      block.dk, pairs_at(block.dscores_at(pair_stage)),
      b_turned(RowPointer::by_rows(address(block.q_smem + stage * c.query_bytes())).from(0, first_dim)));
}

/// Waits until it is the block's turn to add to a tile of queries.
template <typename Block>
__device__ __forceinline__ void await_turn(const Block& block, const QuerySteps& steps) {
  if (block.lane == 0) {
    std::uint32_t* flag = block.space.order.done + block.sums_tile(steps);
    const TurnWords words = block.turn_words(steps);
    await_flag(flag, words.before);
    if (block.warp == 0) *block.turn_smem = {flag, words.after};
  }
  __syncwarp();  // what lane 0 saw is to be seen by the warp
}
/// Ends the last turn there was: a barrier stands between all that the block added and this.
template <typename Block>
__device__ __forceinline__ void end_turn(const Block& block) {
  if (threadIdx.x != 0 || block.turn_smem->flag == nullptr) return;
  raise_flag(block.turn_smem->flag, block.turn_smem->word);
  block.turn_smem->flag = nullptr;
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
      dq, a_turned<query_tiles>(dscores.from(0, first_query / 16)),
      b_turned(RowPointer::by_rows(Block::address(block.k_smem)).from(0, first_dim)), Nothing{}, [&] {
        if (space.order.kept()) await_turn(block, steps);  // here registers are to be had
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

}  // namespace tilewise::cuda::mma
