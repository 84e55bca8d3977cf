#pragma once

#include "cuda/attention/common/backward/queries.cuh"

namespace tilewise::cuda::mma {

/// Q tiles in the longest share where CTAs add to dQ in order. A share is whole heads, or a part of
/// one head. With causal, a CTA of later keys starts later but sees fewer tiles of a head, so it does not end
/// later. Of a part of a head it may see as many tiles as the others.
inline std::int64_t ordered_tiles(const AttentionCall& call, const BackwardGrid& grid, std::int64_t shares) {
  const std::int64_t tiles = grid.queries.tiles;
  if (shares <= call.group()) return (call.group() + shares - 1) / shares * tiles;
  const std::int64_t shares_per_head = shares / call.group();
  const std::int64_t share_tiles = (tiles + shares_per_head - 1) / shares_per_head;
  return share_tiles + (Turns::uneven(call) ? (tiles - share_tiles) / 2 : 0);
}

/// How many CTAs share the queries of a K tile: more than one where there would be fewer CTAs than fit into
/// the GPU at once. The unit of time is a Q tile. Each further CTA costs about two, to load its keys and to
/// write its partial dK and dV. Results wider than the rows are joined from at least two shares (pieces.h).
inline int shares_of(const AttentionCall& call, const BackwardConfig& c, int multiprocessors) {
  constexpr std::int64_t most = 16;
  // Q tiles of a share. Where the gradients have few elements there are few CTAs, so each tile counts.
  const std::int64_t least_tiles = few_gradients(call.problem) ? 1 : 4;
  constexpr std::int64_t cta_cost = 2;
  const BackwardGrid grid = BackwardGrid::of(call, c, multiprocessors);
  const std::int64_t ctas = grid.count();
  const std::int64_t tiles = call.group() * grid.queries.tiles;
  const std::int64_t room = std::int64_t{c.blocks} * multiprocessors;
  const std::int64_t least = call.problem.piece.wide_rows ? 2 : 1;
  if (ctas == 0 || ctas >= room) return static_cast<int>(least);
  const auto time = [&](std::int64_t shares) {
    const std::int64_t longest =
        (call.deterministic ? ordered_tiles(call, grid, shares) : (tiles + shares - 1) / shares) + cta_cost;
    if (!Turns::uneven(call)) return room * ((ctas * shares + room - 1) / room) * longest;
    // Half of the elements of S are seen, and short CTAs fill the end.
    return std::max(room * longest, ctas * (tiles / 2 + shares * cta_cost) + room * longest / 2);
  };
  std::int64_t best = 1;
  for (std::int64_t shares = 2; shares <= std::min(most, tiles / least_tiles); ++shares) {
    if (call.deterministic && shares > call.group() && shares % call.group() != 0) continue;
    if (time(shares) < time(best)) best = shares;
  }
  return static_cast<int>(std::max(best, least));
}

}  // namespace tilewise::cuda::mma
