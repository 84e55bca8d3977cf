#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewise::cuda::wgmma {

/// Queries that a block takes at a time: tile `tile` of head `head`, heads of all batch entries counted.
struct Turn {
  int head = 0;
  int tile = 0;
  bool taken = false;  ///< false: nothing in this round
};

/// Who computes what. As many blocks as multiprocessors go through rounds, in each of which every block has a
/// tile or none. All of it is known beforehand, so that nothing has to be counted, or reset, in memory.
///
/// Where tiles are equal, heads come one after another, so that blocks that run together share keys in the
/// L2. Where later queries see more keys, sections of heads come one after another, and in a section the
/// longest tiles of all its heads first. Blocks are dealt to forwards and backwards in turn, so that who had
/// the longest of a round has the shortest of the next. A section has at least two rounds, which makes it
/// even within itself, and more heads only as rounding has it: then keys are still in the L2 when shorter
/// tiles read them. Long sequences have sections of at least eight heads, since blocks of one head run at
/// about the same place in it; what is left uneven at the end is then a few short tiles.
struct Schedule {
  int blocks = 1;
  int heads = 0;          ///< of all batch entries
  int tiles = 0;          ///< a head
  int section_heads = 0;  ///< 0: tiles are equal

  static constexpr Schedule of(int multiprocessors, int heads, int tiles, bool uneven) {
    const auto all = static_cast<std::int64_t>(heads) * tiles;
    Schedule schedule{.blocks = static_cast<int>(std::min<std::int64_t>(all, multiprocessors)),
                      .heads = heads,
                      .tiles = tiles};
    if (uneven && all > 0) {
      const int least = std::max(8, (2 * schedule.blocks + tiles - 1) / tiles);
      const int sections = std::max(1, heads / least);
      schedule.section_heads = (heads + sections - 1) / sections;
    }
    return schedule;
  }

  constexpr int rounds() const {
    if (section_heads == 0) return rounds_of(heads);
    const int sections = (heads + section_heads - 1) / section_heads;
    return sections * rounds_of(section_heads);
  }

  constexpr Turn turn(int round, int block) const {
    if (section_heads == 0) {
      const std::int64_t index = static_cast<std::int64_t>(round) * blocks + block;
      if (index >= static_cast<std::int64_t>(heads) * tiles) return {};
      const auto place = static_cast<unsigned>(index);
      return {static_cast<int>(place / static_cast<unsigned>(tiles)),
              static_cast<int>(place % static_cast<unsigned>(tiles)), true};
    }
    const int section_rounds = rounds_of(section_heads);
    const int first = round / section_rounds * section_heads;
    const int count = std::min(section_heads, heads - first);
    const int dealt = round % 2 == 0 ? block : blocks - 1 - block;
    const int index = round % section_rounds * blocks + dealt;
    if (index >= count * tiles) return {};
    return {first + index % count, tiles - 1 - index / count, true};
  }

 private:
  constexpr int rounds_of(int some_heads) const {
    return static_cast<int>((static_cast<std::int64_t>(some_heads) * tiles + blocks - 1) / blocks);
  }
};

}  // namespace tilewise::cuda::wgmma
