#pragma once

#include <algorithm>
#include <cmath>

#include "cuda/attention/common/f32/split_rows.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/common/tuning_problem.h"
#include "cuda/attention/sm80/backward_f32/backward.h"
#include "cuda/attention/sm80/backward_f32/pairs.cuh"
#include "cuda/attention/sm80/backward_f32/space.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/team.cuh"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma_f32 {

// Backward for f32 on tensor cores. A block keeps some keys and their values and walks over the queries that
// see them, those of all query heads of a group: five products a pair of tiles. A warp has 16 keys for
// itself. Pairs are held transposed, a row a key, so that they come out of k·qᵀ and v·d_oᵀ in the form in
// which they go into dv and dk, which stay in registers. Score gradients pass through shared memory to dq,
// which is added up in global memory. Where there are too few blocks of keys to keep all multiprocessors
// busy, several blocks share the queries of the same keys and add up dk and dv there, too.

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

// From a call to the row of a tuning table that it runs by.

/// What backward does beside splitting its four tensors, with the same rows: those of d_o meet o, for what is
/// known of a query before the walk, and gradients become 0 where they will be added up. Head dims are
/// multiples of 4, and rows are aligned.
struct RowValuesBeside {
  static constexpr bool norms = true;
  static constexpr bool marks_tiles = false;
  static constexpr int few_queries = few_backward_queries;
  enum Which { keys, values, queries, d_o, count };  ///< the order in which they are split

  RowValues to;
  simt::Peaks peaks;
  bool adds_key_gradients = false;

  template <int lanes>
  __device__ void row(const AttentionCall& call, const SplitPlace& at, const float (&x)[8],
                      bool present) const {
    if (at.which == d_o) return find<lanes>(call, at, x, present);
    if (!present) return;
    if (at.which == queries) clear(call.dq, call.problem.dim_qk, at);
    if (at.which == keys && adds_key_gradients) clear(call.dk, call.problem.dim_qk, at);
    if (at.which == values && adds_key_gradients) clear(call.dv, call.problem.dim_v, at);
  }

 private:
  static __device__ void clear(const Rows& rows, std::int64_t dims, const SplitPlace& at) {
    if (!rows.wanted) return;
    auto* to = reinterpret_cast<float4*>(rows.at(at.b, at.h, at.s)) + 2 * at.chunk;
    if (8 * at.chunk < dims) to[0] = {};
    if (8 * at.chunk + 4 < dims) to[1] = {};
  }

  template <int lanes>
  __device__ void find(const AttentionCall& call, const SplitPlace& at, const float (&own)[8],
                       bool present) const {
    float o[8] = {};
    float lse = 0, d_lse = 0;
    if (present) {
      load_eight(o, reinterpret_cast<const float*>(call.o.at(at.b, at.h, at.s)), 8 * at.chunk,
                 static_cast<int>(call.problem.dim_v), true);
      lse = *reinterpret_cast<const float*>(call.lse.at(at.b, at.h, at.s));
      if (call.d_lse.wanted) d_lse = *reinterpret_cast<const float*>(call.d_lse.at(at.b, at.h, at.s));
    }
    float product = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) product = fmaf(o[n], own[n], product);
    product = sum_over<lanes>(product);
    if (!present || at.chunk != 0) return;
    const std::int64_t row = at.h * call.rows_q() + call.first_row_q(at.b) + at.i;
    const bool unseen = lse == minus_infinity;
    // Exponents lose digits the farther they are from 0. Weights of a row lie around 1 over the number of
    // keys; half the logarithm of that leaves some to the highest ones.
    const KeyRange seen = call.keys_of(call.sequence(at.b), at.i);
    const int middle =
        unseen ? 0 : (31 - __clz(static_cast<int>(max(seen.last - seen.first, std::int64_t{1})))) / 2;
    const double exact = static_cast<double>(lse) * 1.4426950408889634 - middle;
    const auto top = static_cast<float>(exact);
    const auto lost = static_cast<float>(exact - static_cast<double>(top));
    to.top[row] = unseen ? -minus_infinity : top;
    to.factor[row] = unseen ? 0.0f : exp2f(-lost) * power_of_two(weight_bits - middle);
    to.shift[row] = unseen ? 0.0f : d_lse - product;
    peaks.clear(row);
  }
};

inline int backward_dim(const AttentionCall& call) {
  return backward_dim(std::max(call.problem.dim_qk, call.problem.dim_v));
}

inline BackwardSpace backward_space_of(const AttentionCall& call, void* base) {
  return {call, base, BackwardConfig::keys, BackwardConfig::parts, backward_dim(call)};
}

inline simt::SomeHeads unfit_of(const BackwardSpace& space) {
  return {.queries = space.unfit.queries, .keys = space.unfit.keys, .any = space.unfit.any};
}

/// Before the walk; `shares` is how many blocks will share the queries of the same keys.
template <int dim>
void prepare_backward(const AttentionCall& call, const BackwardSpace& space, int shares,
                      cudaStream_t stream) {
  constexpr int keys = BackwardConfig::keys;
  constexpr int parts = BackwardConfig::parts;
  clear_marks(space.unfit, stream);
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  split<dim, keys, parts, SwizzledTile<dim>, RowValuesBeside>(
      call,
      {.any_unfit = space.unfit.any,
       .count = RowValuesBeside::count,
       .tensors = {{call.k, dim_qk, space.k, space.unfit.keys},
                   {call.v, dim_v, space.v, space.unfit.keys},
                   {call.q, dim_qk, space.q, space.unfit.queries},
                   {call.d_o, dim_v, space.d_o, space.unfit.queries}}},
      stream, {.to = space.rows, .peaks = space.peaks, .adds_key_gradients = shares > 1});
}

inline std::int64_t head_blocks_of(const AttentionCall& call, const BackwardConfig& c) {
  return (call.problem.length_k + c.own() - 1) / c.own();
}

/// How many blocks share the queries of the same keys: as many as the last block ends soonest with, by a
/// model of time in tiles of queries. Blocks of like length go in rounds. Of unlike ones the longest go
/// first, so that all end together, but none before the longest. What a block takes beside its queries, for
/// keys and their gradients, was measured on an H200 as that of two thirds of a tile.
inline int shares_of(const AttentionCall& call, const BackwardConfig& c, int multiprocessors) {
  constexpr int most = 8;
  constexpr double more = 0.7;
  const AttentionProblem& problem = call.problem;
  const auto slots = static_cast<double>(multiprocessors * c.blocks);
  const auto blocks = static_cast<double>(problem.batch * problem.heads_kv * head_blocks_of(call, c));
  const bool window = call.band.left < Band::unbounded && call.band.right < Band::unbounded;
  const std::int64_t queries =
      window ? std::min(problem.length_q, c.own() + call.band.left + call.band.right) : problem.length_q;
  const auto tiles = static_cast<double>(call.group() * ((queries + c.keys - 1) / c.keys));
  int chosen = 1;
  double least = 0;
  for (int shares = 1; shares <= most; ++shares) {
    const double longest = tiles / shares + more;
    const double time = Turns::uneven(call) ? std::max(longest, blocks * (tiles / 2 + more * shares) / slots)
                                            : std::ceil(blocks * shares / slots) * longest;
    if (shares > 1 && time >= least) continue;
    chosen = shares;
    least = time;
  }
  return chosen;
}

template <typename Table, int row>
void run_backward_row(const AttentionCall& call, const BackwardSpace& space, int multiprocessors,
                      cudaStream_t stream) {
  constexpr BackwardConfig c = Table::rows[row];
  const std::int64_t head_blocks = head_blocks_of(call, c);
  const int shares = shares_of(call, c, multiprocessors);
  prepare_backward<c.dim>(call, space, shares, stream);
  launch<backward_kernel<Table, row>>(
      {.name = "tilewise mma backward",
       .blocks = call.problem.batch * call.problem.heads_kv * head_blocks * shares,
       .threads = c.threads(),
       .shared_bytes = c.shared_bytes(),
       .stream = stream,
       .early = begins_early(call.problem.device)},
      call, head_blocks, shares, space, unfit_of(space));
}

/// The row of a table that suits a call.
template <typename Table>
int choose_backward_row(const AttentionCall& call, std::size_t shared_bytes) {
  const int dim = backward_dim(call);
  const auto able = [&](const BackwardConfig& c) { return c.dim == dim && c.shared_bytes() <= shared_bytes; };
  const int chosen = tuned_row<Table>(call, able, first_row<Table>(able));
  if (chosen < 0) throw DeviceError("tilewise mma backward: too little shared memory for its tiles");
  return chosen;
}

template <typename Table>
void run_chosen_backward(const AttentionCall& call, const BackwardSpace& space, int chosen,
                         int multiprocessors, cudaStream_t stream) {
  with_row<Table>(chosen,
                  [&](auto row) { run_backward_row<Table, row>(call, space, multiprocessors, stream); });
}

}  // namespace tilewise::cuda::mma_f32
