#pragma once

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/common/tuning_problem.h"
#include "cuda/attention/sm80/forward/split_kv.h"
#include "cuda/attention/sm80/forward/tuning.h"
#include "cuda/runtime/device.h"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma {

// Which row of the table a call runs by, and with how many splits. Workspace and launch use the same choice.

/// The row of the table for a call.
template <typename Table>
int choose_row(const AttentionCall& call, const DeviceProperties& device) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  const bool additive = call.problem.features.mask == MaskKind::additive;
  const auto fits = [&](const ForwardConfig& c) {
    return c.dim >= dim && c.shared_bytes(Table::general) <= device.shared_bytes &&
           (c.additive || !additive) && (c.split_kv || !call.problem.piece.wide_rows);
  };
  const auto grid = [&](const ForwardConfig& c) {
    return ForwardGrid::of(call, c.rows(), device.multiprocessors);
  };
  const int alone = first_row<Table>([&](const ForwardConfig& c) { return c.warps == 1 && fits(c); });
  const bool one_warp = alone >= 0 && grid(Table::rows[alone]).queries.tiles == 1;
  const int least_dim = smallest<Table>([&](const ForwardConfig& c) { return c.warps > 1 && fits(c); },
                                        [](const ForwardConfig& c) { return c.dim; });
  const auto able = [&](const ForwardConfig& c) {
    return c.warps == 1 ? one_warp && c == Table::rows[alone] : c.dim == least_dim && fits(c);
  };
  const int chosen = one_warp ? alone : least_row<Table>(able, [&](int row) {
    return fill_cost<Table>(row, 4 * grid(Table::rows[row]).count() >= 3 * device.multiprocessors);
  });
  if (chosen < 0) throw DeviceError("tilewise mma forward: too little shared memory for its tiles");
  return tuned_row<Table>(call, able, chosen);
}

inline Splits splits_for(const AttentionCall& call, const ForwardConfig& c, const DeviceProperties& device,
                         void* space) {
  const int count = choosing_by(call, [&](const AttentionCall& asked) {
    const std::int64_t ctas = ForwardGrid::of(asked, c.rows(), device.multiprocessors).count();
    const std::int64_t room = std::int64_t{c.blocks} * device.multiprocessors;
    return c.split_kv ? splits_of(asked, ctas, room, c.keys) : 1;
  });
  return Splits::of(call, count, space);
}

}  // namespace tilewise::cuda::mma
