#pragma once

#include "cuda/attention/common/backward/queries.cuh"

namespace tilewise::cuda::mma {

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
/// for its sums. Results that are wider than rows are joined from two shares at the least (pieces.h).
inline int shares_of(const AttentionCall& call, const BackwardConfig& c, int multiprocessors) {
  constexpr std::int64_t most = 16;
  // Of queries, in a share. Where results are few, so are the blocks, and each tile counts.
  const std::int64_t least_tiles = few_gradients(call.problem) ? 1 : 4;
  constexpr std::int64_t block_cost = 2;
  const BackwardBlocks cut = BackwardBlocks::of(call, c, multiprocessors);
  const std::int64_t blocks = cut.count();
  const std::int64_t tiles = call.group() * cut.queries.tiles;
  const std::int64_t room = std::int64_t{c.blocks} * multiprocessors;
  const std::int64_t least = call.problem.piece.wide_rows ? 2 : 1;
  if (blocks == 0 || blocks >= room) return static_cast<int>(least);
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
  return static_cast<int>(std::max(best, least));
}

}  // namespace tilewise::cuda::mma
