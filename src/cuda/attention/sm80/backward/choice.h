#pragma once

#include <iterator>

#include "cuda/attention/common/backward/shares.h"
#include "cuda/attention/sm80/backward/tuning.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda::mma {

// Which row of a table a call runs by, and how many blocks share a tile of keys: what the workspace and the
// launches agree on.

/// The first row that is large enough and fits.
template <typename Table>
int choose_backward_row(const AttentionCall& call, const DeviceProperties& device) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  constexpr int rows = static_cast<int>(std::size(Table::rows));
  for (int row = 0; row < rows; ++row) {
    const BackwardConfig& c = Table::rows[row];
    if (c.dim >= dim && c.shared_bytes(Table::general) <= device.shared_bytes) return row;
  }
  throw DeviceError("tilewise mma backward: too little shared memory for its tiles");
}

/// The workspace of a call.
inline BackwardSpace backward_space(const AttentionCall& call, const Context& context) {
  const DeviceProperties& device = device_properties(context.device.index);
  const auto shares = [&]<typename Table>(const Table&) {
    return shares_of(call, Table::rows[choose_backward_row<Table>(call, device)], device.multiprocessors);
  };
  return {call, context.workspace.data,
          general_backward(call) ? shares(GeneralBackward{}) : shares(PlainBackward{})};
}

}  // namespace tilewise::cuda::mma
