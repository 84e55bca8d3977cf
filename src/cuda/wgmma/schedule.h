#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewise::cuda::wgmma {

/// A tile of queries: tile `tile` of head `head`, heads of all batch entries counted.
struct Turn {
  int head = 0;
  int tile = 0;
};

/// In which order tiles are computed, by as many blocks as there are multiprocessors.
///
/// Where tiles are equal, a block takes every blocks-th of them, heads one after another, so that blocks that
/// run together share keys in the L2. Where later queries see more keys, a block that is done takes the next
/// (turns.cuh): sections of heads come one after another, and in a section the longest tiles of all its heads
/// first, so that short ones fill the end. A section has work for two tiles a block, or its longest would be
/// what is waited for in the end, and no more heads than that takes: then keys are still in the L2 when
/// shorter tiles read them again.
struct Schedule {
  int blocks = 1;
  int heads = 0;          ///< of all batch entries
  int tiles = 0;          ///< a head
  int section_heads = 0;  ///< 0: tiles are equal

  static constexpr Schedule of(int multiprocessors, int heads, int tiles, bool uneven) {
    Schedule schedule{.blocks = std::min(heads * tiles, multiprocessors), .heads = heads, .tiles = tiles};
    if (uneven && schedule.total() > 0) {
      const int least = (2 * schedule.blocks + tiles - 1) / tiles;
      const int sections = std::max(1, heads / least);
      schedule.section_heads = (heads + sections - 1) / sections;
    }
    return schedule;
  }

  constexpr int total() const { return heads * tiles; }
  /// Whether blocks take what is next instead of every blocks-th.
  constexpr bool counted() const { return section_heads > 0 && total() > blocks; }
  /// Tiles a block, of equal ones.
  constexpr int rounds() const { return (total() + blocks - 1) / blocks; }

  constexpr Turn turn(int index) const {
    if (section_heads == 0) return {index / tiles, index % tiles};
    const int first = index / (section_heads * tiles) * section_heads;
    const int count = std::min(section_heads, heads - first);
    const int inside = index - first * tiles;
    return {first + inside % count, tiles - 1 - inside / count};
  }
};

}  // namespace tilewise::cuda::wgmma
