#pragma once

#include <iterator>

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/sm80/forward/parts.h"
#include "cuda/attention/sm80/forward/tuning.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda::mma {

// Which row of a table a call runs by, and in how many parts: what the workspace and the launch agree on.

/// The row of a table that suits a call.
template <typename Table>
int choose_row(const AttentionCall& call, const DeviceProperties& device) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  const auto fits = [&](const ForwardConfig& c) {
    return c.dim >= dim && c.shared_bytes(Table::general) <= device.shared_bytes &&
           (c.additive || call.problem.features.mask != MaskKind::additive) &&
           (c.in_parts || !call.problem.piece.wide_rows);
  };
  constexpr int count = static_cast<int>(std::size(Table::rows));
  for (int row = 0; row < count; ++row) {
    const ForwardConfig& c = Table::rows[row];
    if (c.warps == 1 && fits(c) &&
        QueryBlocks::of(call, c.rows(), device.multiprocessors).queries.tiles == 1) {
      return row;
    }
  }
  int chosen = -1;
  for (int row = 0; row < count; ++row) {
    const ForwardConfig& c = Table::rows[row];
    if (c.warps == 1 || !fits(c)) continue;
    if (chosen >= 0 && c.dim > Table::rows[chosen].dim) break;
    chosen = row;
    // A smaller tile does less work a second, so it pays only where most of the GPU would stand idle.
    const std::int64_t blocks = QueryBlocks::of(call, c.rows(), device.multiprocessors).count();
    if (4 * blocks >= 3 * device.multiprocessors) break;
  }
  if (chosen < 0) throw DeviceError("tilewise mma forward: too little shared memory for its tiles");
  return chosen;
}

inline Parts parts_for(const AttentionCall& call, const ForwardConfig& c, const DeviceProperties& device,
                       void* space) {
  const std::int64_t blocks = QueryBlocks::of(call, c.rows(), device.multiprocessors).count();
  const std::int64_t room = std::int64_t{c.blocks} * device.multiprocessors;
  return Parts::of(call, c.in_parts ? parts_of(call, blocks, room, c.keys) : 1, space);
}

}  // namespace tilewise::cuda::mma
