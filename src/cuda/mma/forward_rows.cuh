#pragma once

#include <iterator>
#include <utility>

#include "cuda/mma/forward.cuh"
#include "cuda/mma/forward.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma {

// From a call to the row of a tuning table that it runs by.

template <typename T, typename Table, int row>
void run_row(const AttentionCall& call, int multiprocessors, cudaStream_t stream) {
  constexpr ForwardConfig c = Table::rows[row];
  const QueryBlocks blocks = QueryBlocks::of(call, c.rows(), multiprocessors);
  launch<forward_kernel<T, Table, row>>({.name = "tilewise mma forward",
                                         .blocks = blocks.count(),
                                         .threads = c.threads(),
                                         .shared_bytes = c.shared_bytes(Table::general),
                                         .stream = stream},
                                        call, blocks);
}

/// The row of a table that suits a call.
template <typename Table>
int choose_row(const AttentionCall& call, const DeviceProperties& device) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  int chosen = -1;
  for (int row = 0; row < static_cast<int>(std::size(Table::rows)); ++row) {
    const ForwardConfig& c = Table::rows[row];
    if (c.dim < dim || c.shared_bytes(Table::general) > device.shared_bytes) continue;
    if (chosen >= 0 && c.dim > Table::rows[chosen].dim) break;
    chosen = row;
    // A smaller tile does less work a second, so it pays only where most of the GPU would stand idle.
    const std::int64_t blocks = QueryBlocks::of(call, c.rows(), device.multiprocessors).count();
    if (4 * blocks >= 3 * device.multiprocessors) break;
  }
  if (chosen < 0) throw DeviceError("tilewise mma forward: too little shared memory for its tiles");
  return chosen;
}

/// Runs the row that suits; all of the table is compiled.
template <typename T, typename Table>
void run_suited(const AttentionCall& call, const Context& context) {
  const DeviceProperties& device = device_properties(context.device.index);
  const int chosen = choose_row<Table>(call, device);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  [&]<int... row>(std::integer_sequence<int, row...>) {
    ((row == chosen ? run_row<T, Table, row>(call, device.multiprocessors, stream) : void()), ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(Table::rows))>{});
}

}  // namespace tilewise::cuda::mma
