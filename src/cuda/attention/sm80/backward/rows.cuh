#pragma once

#include "cuda/attention/sm80/backward/backward.cuh"
#include "cuda/attention/sm80/backward/backward.h"
#include "cuda/attention/sm80/backward/choice.h"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma {

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
