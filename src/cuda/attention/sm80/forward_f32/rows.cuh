#pragma once

#include "cuda/attention/common/tuning_problem.h"
#include "cuda/attention/sm80/forward_f32/forward.cuh"
#include "cuda/attention/sm80/forward_f32/forward.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma_f32 {

// From a call to the row of a tuning table that it runs by.

/// The dim that a call's head dims are filled up to.
template <typename Table>
int table_dim(const AttentionCall& call) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  return smallest<Table>([&](const ForwardConfig& c) { return c.dim >= dim; },
                         [](const ForwardConfig& c) { return c.dim; });
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
  const int chosen = choose_row_of<Table>(
      call, [&](const ForwardConfig& c) { return c.dim == dim && c.shared_bytes() <= device.shared_bytes; },
      [&](int row) {
        const auto blocks = QueryBlocks::of(call, Table::rows[row].rows(), device.multiprocessors);
        return fill_cost<Table>(row, 4 * blocks.count() >= 3 * device.multiprocessors);
      });
  if (chosen < 0) throw DeviceError("tilewise mma forward: too little shared memory for its tiles");
  return chosen;
}

template <typename Table>
Configuration configuration_of(const AttentionCall& call, const Context& context) {
  return {.workspace_bytes = space_of<Table>(call, nullptr).bytes,
          .row = choose_row<Table>(call, device_properties(context.device.index))};
}

/// Runs the chosen row and returns what it left; all of the table is compiled.
template <typename Table>
ForwardSpace run_chosen(const AttentionCall& call, int chosen, const Context& context) {
  const ForwardSpace space = space_of<Table>(call, context.workspace.data);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  with_row<Table>(chosen, [&](auto row) { run_row<Table, row>(call, space, multiprocessors, stream); });
  return space;
}

}  // namespace tilewise::cuda::mma_f32
