#pragma once

#include <iterator>
#include <utility>

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

/// Runs the row that suits; all of the table is compiled.
template <typename T, typename Table>
void run_suited_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context) {
  const DeviceProperties& device = device_properties(context.device.index);
  const int chosen = choose_backward_row<Table>(call, device);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  [&]<int... row>(std::integer_sequence<int, row...>) {
    ((row == chosen ? run_backward_row<T, Table, row>(call, space, device.multiprocessors, stream) : void()),
     ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(Table::rows))>{});
}

}  // namespace tilewise::cuda::mma
