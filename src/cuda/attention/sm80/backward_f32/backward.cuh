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

// Backward for f32 on tensor cores. A CTA keeps a tile of K and V and walks over the Q and dO tiles that see
// it, of all query heads of a group. Each pair of tiles takes five products. A warp has 16 keys of its own. P
// and dS are held transposed, with one row per key, so the accumulators of Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ have the
// register layout of operand A in the products for dV and dK, which stay in registers. dS passes through
// shared memory to dQ, which is added to global memory. Where there are too few K tiles to fill all SMs,
// several CTAs share the queries of a K tile and add dK and dV to global memory, too.

/// Adds what a Q tile gives to dK, dV and dQ.
template <auto c>
__device__ __forceinline__ void add_queries(BackwardCta<c>& cta, const QueriesAt& at, int stage) {
  const float* row_values = cta.row_values_stage(stage);
  const int q_exponent = __float_as_int(row_values[3 * c.keys]);
  const int d_o_exponent = __float_as_int(row_values[3 * c.keys + 1]);
  // |dS| is at most P·(|dO|·|V| + |dLSE − delta|). `exponent` brings this bound below 2^15.
  const int minus_delta_bits =
      __reduce_max_sync(~0u, __float_as_int(fabsf(row_values[2 * c.keys + cta.lane])));
  const float bound = fmaf(row_values[3 * c.keys + 2], cta.v_norm, __int_as_float(minus_delta_bits));
  const int exponent = exponent_for(bound);

  float s[1][c.keys / 8][4];
  multiply_tile<c, c.part_bytes()>(
      s,
      [&](Parts<c>(&a)[1], int step) {
        load_rows<c, c.part_bytes()>(a, MatrixPointer<c.dim>::by_rows(cta.warp_rows(cta.k_smem)), step);
      },
      cta.address(cta.q_stage(stage)));
  const auto scale_log2 = static_cast<float>(cta.call.scale * 1.4426950408889634);
  exponentiate(cta, s, scaled_up_to(scale_log2, -q_exponent - cta.k_exponent), row_values);
  if (at.first < cta.whole_first || at.first + c.keys - 1 > cta.whole_last) hide(cta, s, at.first);
  float dp[1][c.keys / 8][4];
  multiply_tile<c, c.part_bytes()>(
      dp,
      [&](Parts<c>(&a)[1], int step) {
        load_rows<c, c.part_bytes()>(a, MatrixPointer<c.dim>::by_rows(cta.warp_rows(cta.v_smem)), step);
      },
      cta.address(cta.d_o_stage(stage)));
  const int power = exponent - p_scale_bits;
  compute_ds(cta, dp, s, scaled_up_to(1.0f, power - d_o_exponent - cta.v_exponent),
             power_of_two(max(power, -126)), row_values);
  float highest = 0;
#pragma unroll
  for (int n = 0; n < c.keys / 2; ++n) highest = fmaxf(highest, s[0][n / 4][n % 4]);
  const bool peaks = __any_sync(~0u, highest > simt::peak_weight * power_of_two(p_scale_bits));
  if (peaks) take_peaks(cta, dp, s, at.row, power_of_two(max(power, -126)));
  sum_rows(cta, dp, s, peaks);
  ScoreFragments<c> ds_fragments;
  split_scores<c>(ds_fragments, dp);
  store_ds(cta, ds_fragments);
  {
    ScoreFragments<c> p_fragments;
    split_scores<c>(p_fragments, s);
    add_tile<c, c.part_bytes()>(cta.dv.sum, p_fragments, cta.address(cta.d_o_stage(stage)),
                                cta.dv.rescale_for(d_o_exponent));
  }
  add_tile<c, c.part_bytes()>(cta.dk.sum, ds_fragments, cta.address(cta.q_stage(stage)),
                              cta.dk.rescale_for(q_exponent + exponent));
  __syncthreads();  // dS and the sums of all warps are in shared memory
  add_row_sums(cta, at, exponent);
  add_dq(cta, at, exponent);
}

/// The CTA's share of the queries, one Q tile after another.
template <auto c>
__device__ __forceinline__ void mainloop(BackwardCta<c>& cta, int share, int shares) {
  const QueryRange range = queries_of(cta.call, cta.sequence, cta.first_key,
                                      min(cta.first_key + c.cta_keys(), cta.sequence.length_k));
  const auto first = static_cast<int>(range.first / c.keys);
  const auto tiles = static_cast<int>(range.first < range.last ? (range.last + c.keys - 1) / c.keys - first
                                                               : std::int64_t{0});
  const auto group = static_cast<int>(cta.call.group());
  const auto begin = static_cast<int>(std::int64_t{tiles} * group * share / shares);
  const auto end = static_cast<int>(std::int64_t{tiles} * group * (share + 1) / shares);
  // Tile `tile` of the group's query head `head`.
  const auto place = [&](int head, int tile) -> QueriesAt {
    const std::int64_t hq = cta.h * group + head;
    return {hq, cta.space.q.first(cta.call, cta.b, hq) + tile,
            hq * cta.call.rows_q() + cta.call.first_row_q(cta.b) + std::int64_t{tile} * c.keys,
            tile * c.keys};
  };
  cta.load_keys();
  QueriesAt at{};
  if (begin < end) {
    at = place(begin / tiles, first + begin % tiles);
    cta.load_queries(at, begin % 2);
  }
  commit_copies();
#pragma unroll 1
  for (int item = begin; item < end; ++item) {
    wait_copies<0>();
    __syncthreads();  // the Q tile has arrived; all warps are done with the last one
    QueriesAt next{at.hq, at.split + 1, at.row + c.keys, at.first + c.keys};
    if (item + 1 < end) {
      if (next.first >= range.last) next = place(static_cast<int>(at.hq + 1 - cta.h * group), first);
      cta.load_queries(next, (item + 1) % 2);
    }
    commit_copies();
    add_queries(cta, at, item % 2);
    at = next;
  }
}

template <typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    backward_kernel(const __grid_constant__ AttentionCall call, std::int64_t head_ctas, int shares,
                    const __grid_constant__ BackwardSpace space, const simt::SomeHeads unfit) {
#if __CUDA_ARCH__ >= 800
  let_next_kernel_start();
  wait_for_previous_kernel();  // it split the tensors and wrote the row values
  constexpr BackwardConfig c = Table::rows[row];
  TILEWISE_DYNAMIC_SHARED(std::byte, shared, 128);
  const auto share = static_cast<int>(blockIdx.x % static_cast<unsigned>(shares));
  const Turn turn = Turns::of(call, call.problem.batch * call.problem.heads_kv, head_ctas)
                        .turn(blockIdx.x / static_cast<unsigned>(shares));
  const auto [b, h] = turn.among(call.problem.heads_kv);
  const std::int64_t first_key = std::int64_t{turn.tile} * c.cta_keys();
  if (first_key >= call.sequence(b).length_k || unfit.has_group(call, b, h)) return;
  BackwardCta<c> cta(call, space, b, h, first_key, shared);
  mainloop(cta, share, shares);
  finish(cta, call.dv, cta.dv, call.problem.dim_v, power_of_two(-p_scale_bits), shares == 1);
  finish(cta, call.dk, cta.dk, call.problem.dim_qk, static_cast<float>(call.scale), shares == 1);
#endif
}

// From a call to the row of the tuning table that it runs by.

/// What the kernel that splits Q, K, V and dO does with their rows besides. From rows of dO and O it computes
/// what is known of a query before the mainloop, and it clears the gradients that the mainloop adds to. Head
/// dims are multiples of 4, and rows are aligned.
struct RowValuesWork {
  static constexpr bool norms = true;
  static constexpr bool marks_tiles = false;
  static constexpr int few_queries = few_backward_queries;
  enum Which { keys, values, queries, d_o, count };  ///< the order of Splitting's tensors

  RowValues to;
  simt::Peaks peaks;
  bool adds_key_gradients = false;

  template <int lanes>
  __device__ void row(const AttentionCall& call, const SplitChunk& at, const float (&x)[8],
                      bool present) const {
    if (at.which == d_o) return find<lanes>(call, at, x, present);
    if (!present) return;
    if (at.which == queries) clear(call.dq, call.problem.dim_qk, at);
    if (at.which == keys && adds_key_gradients) clear(call.dk, call.problem.dim_qk, at);
    if (at.which == values && adds_key_gradients) clear(call.dv, call.problem.dim_v, at);
  }

 private:
  static __device__ void clear(const Rows& rows, std::int64_t dims, const SplitChunk& at) {
    if (!rows.wanted) return;
    auto* to = reinterpret_cast<float4*>(rows.at(at.b, at.h, at.s)) + 2 * at.chunk;
    if (8 * at.chunk < dims) to[0] = {};
    if (8 * at.chunk + 4 < dims) to[1] = {};
  }

  template <int lanes>
  __device__ void find(const AttentionCall& call, const SplitChunk& at, const float (&own)[8],
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
    // An exponent is the less exact, the farther it is from 0. P of a row is around 1 over the number of
    // keys. Half the logarithm of that number puts the exponents of the highest P near 0, too.
    const KeyRange seen = call.keys_of(call.sequence(at.b), at.i);
    const int middle =
        unseen ? 0 : (31 - __clz(static_cast<int>(max(seen.last - seen.first, std::int64_t{1})))) / 2;
    const double exact = static_cast<double>(lse) * 1.4426950408889634 - middle;
    const auto rounded = static_cast<float>(exact);
    const auto lost = static_cast<float>(exact - static_cast<double>(rounded));
    to.lse[row] = unseen ? -minus_infinity : rounded;
    to.factor[row] = unseen ? 0.0f : exp2f(-lost) * power_of_two(p_scale_bits - middle);
    to.minus_delta[row] = unseen ? 0.0f : d_lse - product;
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

/// Splits the tensors and computes the row values. `shares` CTAs will share the queries of a K tile.
template <int dim>
void prepare_backward(const AttentionCall& call, const BackwardSpace& space, int shares,
                      cudaStream_t stream) {
  constexpr int keys = BackwardConfig::keys;
  constexpr int parts = BackwardConfig::parts;
  clear_marks(space.unfit, stream);
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  split<dim, keys, parts, SwizzledTile<dim>, RowValuesWork>(
      call,
      {.any_unfit = space.unfit.any,
       .count = RowValuesWork::count,
       .tensors = {{call.k, dim_qk, space.k, space.unfit.keys},
                   {call.v, dim_v, space.v, space.unfit.keys},
                   {call.q, dim_qk, space.q, space.unfit.queries},
                   {call.d_o, dim_v, space.d_o, space.unfit.queries}}},
      stream, {.to = space.rows, .peaks = space.peaks, .adds_key_gradients = shares > 1});
}

inline std::int64_t head_ctas_of(const AttentionCall& call, const BackwardConfig& c) {
  return (call.problem.length_k + c.cta_keys() - 1) / c.cta_keys();
}

/// How many CTAs share the queries of a K tile: the number with which the last CTA ends soonest, by a model
/// of time. The unit is a Q tile. CTAs of equal length run in rounds. Of unequal ones the longest start
/// first, so that all end at about the same time, but not before the longest ends. A CTA's fixed cost, for K,
/// V and their gradients, was measured on an H200 as two thirds of a Q tile's time.
inline int shares_of(const AttentionCall& call, const BackwardConfig& c, int multiprocessors) {
  constexpr int most = 8;
  constexpr double cta_cost = 0.7;
  const AttentionProblem& problem = call.problem;
  const auto slots = static_cast<double>(multiprocessors * c.blocks);
  const auto ctas = static_cast<double>(problem.batch * problem.heads_kv * head_ctas_of(call, c));
  const bool window = call.band.left < Band::unbounded && call.band.right < Band::unbounded;
  const std::int64_t queries =
      window ? std::min(problem.length_q, c.cta_keys() + call.band.left + call.band.right) : problem.length_q;
  const auto tiles = static_cast<double>(call.group() * ((queries + c.keys - 1) / c.keys));
  int chosen = 1;
  double least = 0;
  for (int shares = 1; shares <= most; ++shares) {
    const double longest = tiles / shares + cta_cost;
    const double time = Turns::uneven(call)
                            ? std::max(longest, ctas * (tiles / 2 + cta_cost * shares) / slots)
                            : std::ceil(ctas * shares / slots) * longest;
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
  const std::int64_t head_ctas = head_ctas_of(call, c);
  const int shares = shares_of(call, c, multiprocessors);
  prepare_backward<c.dim>(call, space, shares, stream);
  launch<backward_kernel<Table, row>>(
      {.name = "tilewise mma backward",
       .blocks = call.problem.batch * call.problem.heads_kv * head_ctas * shares,
       .threads = c.threads(),
       .shared_bytes = c.shared_bytes(),
       .stream = stream,
       .early = has_pdl(call.problem.device)},
      call, head_ctas, shares, space, unfit_of(space));
}

/// The row of the table for a call.
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
