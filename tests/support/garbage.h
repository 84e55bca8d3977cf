#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "support/random_problem.h"

namespace tilewise::test {

// Wrong contents of index tensors, for calls that do not check them.

/// A number near 0, near the bound, or anywhere.
inline double garbage_index(Random& rng, std::int64_t bound) {
  constexpr std::int64_t lowest = std::numeric_limits<std::int32_t>::min();
  constexpr std::int64_t highest = std::numeric_limits<std::int32_t>::max();
  const auto number =
      rng.pick<std::int64_t>({lowest, lowest + 1, highest - 1, highest, rng.between(-3, 3),
                              bound + rng.between(-3, 3), rng.between(-bound - 1, 2 * bound + 1),
                              rng.between(0, bound), rng.between(0, bound), rng.between(lowest, highest)});
  return static_cast<double>(std::min(std::max(number, lowest), highest));
}

/// Replaces some or all indices by such numbers.
inline void garble(Random& rng, Buffer& indices, std::int64_t bound) {
  if (!indices.given()) return;
  const double share = rng.pick({0.05, 0.3, 1.0});
  std::vector<double> numbers = indices.values();
  for (double& number : numbers) {
    if (rng.chance(share)) number = garbage_index(rng, bound);
  }
  indices.set_values(numbers);
}

inline bool has_indices(const RandomProblem& p) {
  return p.key_lengths.given() || p.cumulative_q.given() || p.blocks.counts.given();
}

/// The problem with garbage in its index tensors. If it is packed, its bounds on the lengths may be too
/// small, too.
inline RandomProblem garbled(RandomProblem p) {
  Random rng(p.seed + 7);
  // Keys past their length are poison, which a call may read by a garbage length. A CPU passes on the bits of
  // a NaN, so results that depend on poison would look like unwritten ones.
  for (Buffer* rows : {&p.k, &p.v}) {
    std::vector<double> numbers = rows->values();
    for (double& number : numbers) {
      if (std::isnan(number)) number = 1;
    }
    rows->set_values(numbers);
  }
  const auto extent = [](const Buffer& buffer, int dim) { return buffer.given() ? buffer.extent(dim) : 0; };
  garble(rng, p.key_lengths, p.length_k);
  garble(rng, p.page_table, extent(p.k, 0));
  garble(rng, p.cumulative_q, extent(p.q, 0));
  garble(rng, p.cumulative_k, extent(p.k, 0));
  if (p.layout == Layout::packed && rng.chance(0.5)) {
    p.length_q = rng.between(1, std::max<std::int64_t>(p.length_q, 1));
    p.length_k = rng.between(1, std::max<std::int64_t>(p.length_k, 1));
  }
  RandomBlocks& blocks = p.blocks;
  if (!blocks.counts.given()) return p;
  const std::int64_t key_blocks = (p.length_k + blocks.block_k - 1) / blocks.block_k;
  garble(rng, blocks.counts, extent(blocks.indices, 3));
  garble(rng, blocks.indices, key_blocks);
  garble(rng, blocks.full_counts, extent(blocks.full_indices, 3));
  garble(rng, blocks.full_indices, key_blocks);
  garble(rng, blocks.tile_ids, extent(blocks.tiles, 0));
  return p;
}

}  // namespace tilewise::test
