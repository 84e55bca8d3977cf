#pragma once

#include <algorithm>
#include <cmath>

#include "cuda/attention/common/tuning_problem.h"
#include "cuda/attention/sm80/backward_f32/backward.cuh"
#include "cuda/attention/sm80/backward_f32/row_values.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma_f32 {

// From a call to the row of a tuning table that it runs by.

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
