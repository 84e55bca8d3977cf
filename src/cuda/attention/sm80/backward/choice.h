#pragma once

#include "cuda/attention/common/backward/shares.h"
#include "cuda/attention/common/tuning_problem.h"
#include "cuda/attention/sm80/backward/tuning.h"
#include "cuda/runtime/device.h"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma {

// Which row of a table a call runs by, and how many blocks share a tile of keys: what the workspace and the
// launches agree on.

/// The first row that is large enough and fits.
template <typename Table>
int choose_backward_row(const AttentionCall& call, const DeviceProperties& device) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  const auto fits = [&](const BackwardConfig& c) {
    return c.dim >= dim && c.shared_bytes(Table::general) <= device.shared_bytes;
  };
  const int first = first_row<Table>(fits);
  if (first < 0) throw DeviceError("tilewise mma backward: too little shared memory for its tiles");
  return tuned_row<Table>(
      call, [&](const BackwardConfig& c) { return c.dim == Table::rows[first].dim && fits(c); }, first);
}

inline int backward_row(const AttentionCall& call, const DeviceProperties& device) {
  return general_backward(call) ? choose_backward_row<GeneralBackward>(call, device)
                                : choose_backward_row<PlainBackward>(call, device);
}

/// The workspace of a call by that row.
inline BackwardSpace backward_space(const AttentionCall& call, int row, const Context& context) {
  const BackwardConfig& c = general_backward(call) ? GeneralBackward::rows[row] : PlainBackward::rows[row];
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  return {call, context.workspace.data, shares_of(call, c, multiprocessors)};
}

}  // namespace tilewise::cuda::mma
