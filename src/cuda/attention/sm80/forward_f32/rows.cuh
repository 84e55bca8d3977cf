#pragma once

#include <iterator>
#include <utility>

#include "cuda/attention/sm80/forward_f32/forward.cuh"
#include "cuda/attention/sm80/forward_f32/forward.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma_f32 {

// From a call to the row of a tuning table that it runs by.

/// The dim that a call's head dims are filled up to.
template <typename Table>
int table_dim(const AttentionCall& call) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  int least = most_dim;
  for (const ForwardConfig& c : Table::rows) {
    if (c.dim >= dim) least = std::min(least, c.dim);
  }
  return least;
}

template <typename Table>
ForwardSpace space_of(const AttentionCall& call, void* base) {
  return {call, base, Table::keys, Table::parts, table_dim<Table>(call)};
}

/// Splits keys and values.
template <typename Table, int dim>
void split_keys(const AttentionCall& call, const ForwardSpace& space, cudaStream_t stream) {
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  split<dim, Table::keys, Table::parts>(
      call,
      {.any_unfit = space.unfit.any,
       .count = 2,
       .tensors = {{call.k, dim_qk, space.k, space.unfit.keys}, {call.v, dim_v, space.v, space.unfit.keys}}},
      stream);
}

template <typename Table, int row>
void run_row(const AttentionCall& call, const ForwardSpace& space, int multiprocessors, cudaStream_t stream) {
  constexpr ForwardConfig c = Table::rows[row];
  clear_marks(space.unfit, stream);
  split_keys<Table, c.dim>(call, space, stream);
  const QueryBlocks blocks = QueryBlocks::of(call, c.rows(), multiprocessors);
  launch<forward_kernel<Table, row>>({.name = "tilewise mma forward",
                                      .blocks = blocks.count(),
                                      .threads = c.threads(),
                                      .shared_bytes = c.shared_bytes(),
                                      .stream = stream},
                                     call, blocks, space.k, space.v, space.unfit);
}

/// The row of a table that suits a call.
template <typename Table>
int choose_row(const AttentionCall& call, const DeviceProperties& device) {
  const int dim = table_dim<Table>(call);
  int chosen = -1;
  for (int row = 0; row < static_cast<int>(std::size(Table::rows)); ++row) {
    const ForwardConfig& c = Table::rows[row];
    if (c.dim != dim || c.shared_bytes() > device.shared_bytes) continue;
    chosen = row;
    // A smaller tile does less work a second, so it pays only where most of the GPU would stand idle.
    const QueryBlocks blocks = QueryBlocks::of(call, c.rows(), device.multiprocessors);
    if (4 * blocks.count() >= 3 * device.multiprocessors) break;
  }
  if (chosen < 0) throw DeviceError("tilewise mma forward: too little shared memory for its tiles");
  return chosen;
}

/// Runs the row that suits; all of the table is compiled.
template <typename Table>
void run_suited(const AttentionCall& call, const ForwardSpace& space, const Context& context) {
  const DeviceProperties& device = device_properties(context.device.index);
  const int chosen = choose_row<Table>(call, device);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  [&]<int... row>(std::integer_sequence<int, row...>) {
    ((row == chosen ? run_row<Table, row>(call, space, device.multiprocessors, stream) : void()), ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(Table::rows))>{});
}

}  // namespace tilewise::cuda::mma_f32
