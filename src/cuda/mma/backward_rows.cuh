#pragma once

#include <iterator>
#include <utility>

#include "cuda/mma/backward.cuh"
#include "cuda/mma/backward.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma {

// From a call to the row of a tuning table that it runs by.

template <typename T, typename Table, int row>
void run_backward_row(const AttentionCall& call, const BackwardSpace& space, int multiprocessors,
                      cudaStream_t stream) {
  constexpr BackwardConfig c = Table::rows[row];
  const BackwardBlocks blocks = BackwardBlocks::of(call, c, multiprocessors);
  launch<backward_kernel<T, Table, row>>({.name = "tilewise mma backward",
                                          .blocks = blocks.count(),
                                          .threads = c.threads(),
                                          .shared_bytes = c.shared_bytes(Table::general),
                                          .stream = stream},
                                         call, blocks, space);
}

/// Runs the row that suits; all of the table is compiled.
template <typename T, typename Table>
void run_suited_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context) {
  const DeviceProperties& device = device_properties(context.device.index);
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  constexpr int rows = static_cast<int>(std::size(Table::rows));
  int chosen = 0;
  while (chosen < rows && (Table::rows[chosen].dim < dim ||
                           Table::rows[chosen].shared_bytes(Table::general) > device.shared_bytes)) {
    ++chosen;
  }
  if (chosen == rows) throw DeviceError("tilewise mma backward: too little shared memory for its tiles");
  const auto stream = static_cast<cudaStream_t>(context.stream);
  [&]<int... row>(std::integer_sequence<int, row...>) {
    ((row == chosen ? run_backward_row<T, Table, row>(call, space, device.multiprocessors, stream) : void()),
     ...);
  }(std::make_integer_sequence<int, rows>{});
}

}  // namespace tilewise::cuda::mma
