#pragma once

#include "cuda/attention/common/backward/config.h"
#include "cuda/attention/common/backward/shares.h"
#include "cuda/attention/common/tuning_problem.h"
#include "cuda/runtime/device.h"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma {

// Of the rows with the smallest sufficient dim, the first whose tiles fit into the GPU's shared memory is
// taken. bench/sweep_mma_backward.cu measures candidates.

namespace backward_rows {

inline constexpr BackwardConfig dim64{.dim = 64,
                                      .warps = 4,
                                      .queries = 64,
                                      .keys = 128,
                                      .key_warps = 4,
                                      .queries_at_once = 32,
                                      .dim_warps = 1,
                                      .dq_dim_warps = 2,
                                      .weights_stay = true,
                                      .blocks = 2};
/// Rows of the larger dims, with eight warps. `tile` is the number of queries, half of which are computed at
/// once.
constexpr BackwardConfig wide(int dim, int tile, int keys) {
  return {.dim = dim,
          .warps = 8,
          .queries = tile,
          .keys = keys,
          .key_warps = 4,
          .queries_at_once = tile / 2,
          .dim_warps = keys == 128 ? 2 : 4,
          .dq_dim_warps = 4};
}
constexpr BackwardConfig pairs_ahead(BackwardConfig c, int stages, bool matrix_stores) {
  c.pairs_ahead = true;
  c.stages = stages;
  c.matrix_stores = matrix_stores;
  return c;
}

}  // namespace backward_rows

/// For calls in which only the band hides keys, with aligned rows.
struct PlainBackward {
  static constexpr std::string_view name = "attention.sm80.backward";
  static constexpr bool general = false;
  static constexpr BackwardConfig rows[] = {
      backward_rows::dim64,
      backward_rows::pairs_ahead(backward_rows::wide(128, 64, 128), 3, true),
      backward_rows::wide(128, 64, 128),
      backward_rows::wide(128, 32, 64),
      backward_rows::pairs_ahead(backward_rows::wide(256, 64, 64), 2, false),
      backward_rows::wide(256, 32, 64),
  };
};

/// For all other calls.
struct GeneralBackward {
  static constexpr std::string_view name = "attention.sm80.backward_general";
  static constexpr bool general = true;
  static constexpr BackwardConfig rows[] = {
      backward_rows::dim64,
      backward_rows::wide(128, 64, 128),
      backward_rows::wide(128, 32, 64),
      backward_rows::wide(256, 64, 64),
      backward_rows::wide(256, 32, 64),
  };
};

static_assert(dims_rise<PlainBackward>() && dims_rise<GeneralBackward>(),
              "choose_backward_row() takes the first row that is large enough and fits");
static_assert(dims_are_powers_of_two<PlainBackward>() && dims_are_powers_of_two<GeneralBackward>(),
              "warps share dims out evenly, in parts that MatrixPointer::from() can point at");

// Which row of the table a call runs by, and how many CTAs share a K tile. Workspace and launches use the
// same choice.

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
  return choosing_by(call, [&](const AttentionCall& asked) {
    return general_backward(asked) ? choose_backward_row<GeneralBackward>(asked, device)
                                   : choose_backward_row<PlainBackward>(asked, device);
  });
}

/// The workspace of a call that runs by `row`.
inline BackwardSpace backward_space(const AttentionCall& call, int row, const Context& context) {
  const BackwardConfig& c = general_backward(call) ? GeneralBackward::rows[row] : PlainBackward::rows[row];
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const int shares =
      choosing_by(call, [&](const AttentionCall& asked) { return shares_of(asked, c, multiprocessors); });
  return {call, context.workspace.data, shares};
}

}  // namespace tilewise::cuda::mma
