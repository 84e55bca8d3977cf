#pragma once

#include "cuda/attention/sm80/forward/choice.h"
#include "cuda/attention/sm80/forward/forward.cuh"
#include "cuda/attention/sm80/forward/forward.h"
#include "cuda/attention/sm80/forward/general.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma {

// From a call to the row of the tuning table that it runs by.

template <typename T, typename Table, int row>
constexpr auto kernel_of_row() {
  if constexpr (Table::general) {
    return general_kernel<T, Table, row>;
  } else {
    return forward_kernel<T, Table, row>;
  }
}

template <typename T, typename Table, int row>
void run_row(const AttentionCall& call, const DeviceProperties& device, const Context& context) {
  constexpr ForwardConfig c = Table::rows[row];
  const ForwardGrid grid = ForwardGrid::of(call, c.rows(), device.multiprocessors);
  const Splits splits = splits_for(call, c, device, context.workspace.data);
  launch<kernel_of_row<T, Table, row>()>({.name = "tilewise mma forward",
                                          .blocks = grid.count(),
                                          .threads = c.threads(),
                                          .layers = splits.count,
                                          .shared_bytes = c.shared_bytes(Table::general),
                                          .stream = static_cast<cudaStream_t>(context.stream)},
                                         call, grid, splits);
  if (splits.count > 1) combine_splits(call, splits, context.stream);
}

/// Runs row `chosen`; all rows of the table are compiled.
template <typename T, typename Table>
void run_chosen(const AttentionCall& call, const Context& context, int chosen) {
  const DeviceProperties& device = device_properties(context.device.index);
  with_row<Table>(chosen, [&](auto row) { run_row<T, Table, row>(call, device, context); });
}

}  // namespace tilewise::cuda::mma
