#pragma once

#include <iterator>

#include "cuda/attention/common/backward/queries.cuh"
#include "cuda/runtime/device.h"

namespace tilewise::cuda::mma {

// Which row of a table a call runs by, and how many blocks share a tile of keys: what the workspace and the
// launches agree on.

/// What a row takes of shared memory.
template <typename Table>
std::size_t shared_bytes_of(const BackwardConfig& c, const AttentionProblem& problem) {
  return Table::general && whole_pairs(problem) ? c.whole_shared_bytes() : c.shared_bytes(Table::general);
}

/// The first row that is large enough and fits.
template <typename Table>
int choose_backward_row(const AttentionCall& call, const DeviceProperties& device) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  constexpr int rows = static_cast<int>(std::size(Table::rows));
  for (int row = 0; row < rows; ++row) {
    const BackwardConfig& c = Table::rows[row];
    if (c.dim >= dim && shared_bytes_of<Table>(c, call.problem) <= device.shared_bytes) return row;
  }
  throw DeviceError("tilewise mma backward: too little shared memory for its tiles");
}

/// Tiles of queries in the longest share where blocks keep an order: whole heads, or parts of one. With
/// causal, blocks of later keys see fewer of a head's and so do not end later for beginning later; but of a
/// part they may see as many.
inline std::int64_t ordered_tiles(const AttentionCall& call, const BackwardBlocks& cut, std::int64_t shares) {
  const std::int64_t tiles = cut.queries.tiles;
  if (shares <= call.group()) return (call.group() + shares - 1) / shares * tiles;
  const std::int64_t parts = shares / call.group();
  const std::int64_t part = (tiles + parts - 1) / parts;
  return part + (Turns::uneven(call) ? (tiles - part) / 2 : 0);
}

/// How many blocks share the queries of a tile of keys: more than one where there would be fewer blocks than
/// fit into the GPU at once. Times are in tiles of queries; a block more costs about two, for its keys and
/// for its sums.
inline int shares_of(const AttentionCall& call, const BackwardConfig& c, int multiprocessors) {
  constexpr std::int64_t most = 16;
  // Of queries, in a share. Where results are few, so are the blocks, and each tile counts.
  const std::int64_t least_tiles = few_gradients(call.problem) ? 1 : 4;
  constexpr std::int64_t block_cost = 2;
  const BackwardBlocks cut = BackwardBlocks::of(call, c, multiprocessors);
  const std::int64_t blocks = cut.count();
  const std::int64_t tiles = call.group() * cut.queries.tiles;
  const std::int64_t room = std::int64_t{c.blocks} * multiprocessors;
  if (blocks == 0 || blocks >= room) return 1;
  const auto time = [&](std::int64_t shares) {
    const std::int64_t longest =
        (call.deterministic ? ordered_tiles(call, cut, shares) : (tiles + shares - 1) / shares) + block_cost;
    if (!Turns::uneven(call)) return room * ((blocks * shares + room - 1) / room) * longest;
    // Half of the pairs are seen, and short blocks fill the end.
    return std::max(room * longest, blocks * (tiles / 2 + shares * block_cost) + room * longest / 2);
  };
  std::int64_t best = 1;
  for (std::int64_t shares = 2; shares <= std::min(most, tiles / least_tiles); ++shares) {
    if (call.deterministic && shares > call.group() && shares % call.group() != 0) continue;
    if (time(shares) < time(best)) best = shares;
  }
  return static_cast<int>(best);
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
