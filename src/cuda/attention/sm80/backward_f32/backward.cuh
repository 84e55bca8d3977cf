#pragma once

#include "cuda/attention/sm80/backward_f32/gradients.cuh"
#include "cuda/attention/sm80/backward_f32/pairs.cuh"
#include "cuda/attention/sm80/backward_f32/peaks.cuh"
#include "cuda/runtime/dynamic_shared.cuh"

namespace tilewise::cuda::mma_f32 {

// Backward for f32 on tensor cores. A block keeps some keys and their values and walks over the queries that
// see them, those of all query heads of a group: five products a pair of tiles. A warp has 16 keys for
// itself. Pairs are held turned, a row a key, so that they come out of k·qᵀ and v·d_oᵀ in the form in which
// they go into dv and dk, which stay in registers. Score gradients pass through shared memory to dq, which is
// added up in global memory. Where there are too few blocks of keys to keep all multiprocessors busy, several
// blocks share the queries of the same keys and add up dk and dv there, too.

/// All that a tile of queries adds.
template <auto c>
__device__ __forceinline__ void add_queries(BackwardBlock<c>& block, const QueriesAt& at, int stage) {
  const float* values = block.values_stage(stage);
  const int q_exponent = __float_as_int(values[3 * c.keys]);
  const int d_o_exponent = __float_as_int(values[3 * c.keys + 1]);
  // Score gradients are at most the weight times |d_o|·|v| + |shift|, which is brought below 2^15.
  const int shift_bits = __reduce_max_sync(~0u, __float_as_int(fabsf(values[2 * c.keys + block.lane])));
  const float bound = fmaf(values[3 * c.keys + 2], block.v_norm, __int_as_float(shift_bits));
  const int exponent = exponent_for(bound);

  float s[1][c.keys / 8][4];
  multiply_tile<c, c.part_bytes()>(
      s,
      [&](Parts<c>(&a)[1], int step) {
        load_rows<c, c.part_bytes()>(a, MatrixPointer<c.dim>::by_rows(block.own_rows(block.k_smem)), step);
      },
      block.address(block.q_stage(stage)));
  const auto unit = static_cast<float>(block.call.scale * 1.4426950408889634);
  weigh(block, s, scaled_up_to(unit, -q_exponent - block.k_exponent), values);
  if (at.first < block.whole_first || at.first + c.keys - 1 > block.whole_last) hide(block, s, at.first);
  float dp[1][c.keys / 8][4];
  multiply_tile<c, c.part_bytes()>(
      dp,
      [&](Parts<c>(&a)[1], int step) {
        load_rows<c, c.part_bytes()>(a, MatrixPointer<c.dim>::by_rows(block.own_rows(block.v_smem)), step);
      },
      block.address(block.d_o_stage(stage)));
  const int power = exponent - weight_bits;
  differentiate(block, dp, s, scaled_up_to(1.0f, power - d_o_exponent - block.v_exponent),
                power_of_two(max(power, -126)), values);
  float highest = 0;
#pragma unroll
  for (int n = 0; n < c.keys / 2; ++n) highest = fmaxf(highest, s[0][n / 4][n % 4]);
  const bool peaks = __any_sync(~0u, highest > simt::peak_weight * power_of_two(weight_bits));
  if (peaks) take_peaks(block, dp, s, at.row, power_of_two(max(power, -126)));
  find_sums(block, dp, s, peaks);
  Weights<c> pairs;
  split_pairs<c>(pairs, dp);
  store_pairs(block, pairs);
  {
    Weights<c> weights;
    split_pairs<c>(weights, s);
    add_tile<c, c.part_bytes()>(block.dv.sum, weights, block.address(block.d_o_stage(stage)),
                                block.dv.follow(d_o_exponent));
  }
  add_tile<c, c.part_bytes()>(block.dk.sum, pairs, block.address(block.q_stage(stage)),
                              block.dk.follow(q_exponent + exponent));
  __syncthreads();  // everyone's score gradients and sums are there
  add_sums(block, at, exponent);
  add_dq(block, at, exponent);
}

/// The block's share of the queries, one tile after another.
template <auto c>
__device__ __forceinline__ void walk(BackwardBlock<c>& block, int share, int shares) {
  const QueryRange range = queries_of(block.call, block.sequence, block.first_key,
                                      min(block.first_key + c.own(), block.sequence.length_k));
  const auto first = static_cast<int>(range.first / c.keys);
  const auto tiles = static_cast<int>(range.first < range.last ? (range.last + c.keys - 1) / c.keys - first
                                                               : std::int64_t{0});
  const auto group = static_cast<int>(block.call.group());
  const auto begin = static_cast<int>(std::int64_t{tiles} * group * share / shares);
  const auto end = static_cast<int>(std::int64_t{tiles} * group * (share + 1) / shares);
  // Tile `tile` of those of query head `head` of the group.
  const auto place = [&](int head, int tile) -> QueriesAt {
    const std::int64_t hq = block.h * group + head;
    return {hq, block.space.q.first(block.call, block.b, hq) + tile,
            hq * block.call.rows_q() + block.call.first_row_q(block.b) + std::int64_t{tile} * c.keys,
            tile * c.keys};
  };
  block.load_own();
  QueriesAt at{};
  if (begin < end) {
    at = place(begin / tiles, first + begin % tiles);
    block.load_queries(at, begin % 2);
  }
  commit_copies();
#pragma unroll 1
  for (int item = begin; item < end; ++item) {
    wait_copies<0>();
    __syncthreads();  // the tile is there, and everyone is done with the last one
    QueriesAt next{at.hq, at.split + 1, at.row + c.keys, at.first + c.keys};
    if (item + 1 < end) {
      if (next.first >= range.last) next = place(static_cast<int>(at.hq + 1 - block.h * group), first);
      block.load_queries(next, (item + 1) % 2);
    }
    commit_copies();
    add_queries(block, at, item % 2);
    at = next;
  }
}

template <typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    backward_kernel(const __grid_constant__ AttentionCall call, std::int64_t head_blocks, int shares,
                    const __grid_constant__ BackwardSpace space, const simt::SomeHeads unfit) {
#if __CUDA_ARCH__ >= 800
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  constexpr BackwardConfig c = Table::rows[row];
  TILEWISE_DYNAMIC_SHARED(std::byte, shared, 128);
  const auto share = static_cast<int>(blockIdx.x % static_cast<unsigned>(shares));
  const Turn turn = Turns::of(call, call.problem.batch * call.problem.heads_kv, head_blocks)
                        .turn(blockIdx.x / static_cast<unsigned>(shares));
  const auto [b, h] = turn.among(call.problem.heads_kv);
  const std::int64_t first_key = std::int64_t{turn.tile} * c.own();
  if (first_key >= call.sequence(b).length_k || unfit.has_group(call, b, h)) return;
  BackwardBlock<c> block(call, space, b, h, first_key, shared);
  walk(block, share, shares);
  finish(block, call.dv, block.dv, call.problem.dim_v, power_of_two(-weight_bits), shares == 1);
  finish(block, call.dk, block.dk, call.problem.dim_qk, static_cast<float>(call.scale), shares == 1);
#endif
}

}  // namespace tilewise::cuda::mma_f32
