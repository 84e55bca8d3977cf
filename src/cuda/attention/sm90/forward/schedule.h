#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewise::cuda::wgmma {

/// The most bytes of K and V in a section of heads, for an L2 of 50 MB or more that other data passes
/// through, too; and the most bytes of all heads together if they form a single section.
inline constexpr std::int64_t section_bytes = 16 << 20;
inline constexpr std::int64_t single_section_bytes = 40 << 20;

/// The heads of a section if there is a window. With few heads, many tiles of a head run at a time, and
/// neighbouring tiles see the same keys.
inline constexpr int window_heads = 8;

/// For non-negative numbers: an unsigned division takes fewer instructions.
constexpr int quotient(int number, int divisor) {
  return static_cast<int>(static_cast<unsigned>(number) / static_cast<unsigned>(divisor));
}

/// Q tile `tile` of head `head`, where the heads of all batch entries are counted.
struct WorkTile {
  int head = 0;
  int tile = 0;
};

/// In which order Q tiles are computed, by as many persistent CTAs as there are SMs.
///
/// If all tiles take equally long, CTA i takes tiles i, i + CTAs and so on, head after head, so that CTAs
/// which run at the same time share K and V in the L2. If later queries see more keys, or if a head's last
/// tile has few queries, a CTA that is done takes the next tile (scheduler.cuh). Then sections of heads
/// follow one another, and within a section the longest tiles of all heads come first, so that short ones
/// fill the end. A section has as many heads as can keep their K and V in the L2 until shorter tiles read
/// them again.
struct Schedule {
  int blocks = 1;
  int heads = 0;           ///< of all batch entries
  int tiles = 0;           ///< per head
  int section_heads = 0;   ///< 0: all tiles take equally long
  bool last_first = true;  ///< in a section, a head's last tile comes first: it is the longest
  bool mixed = false;      ///< a tile has rows that see many keys and rows that see few: see first_row

  static constexpr Schedule of(int multiprocessors, int heads, int tiles, int section_heads = 0,
                               bool last_first = true) {
    return {.blocks = std::min(heads * tiles, multiprocessors),
            .heads = heads,
            .tiles = tiles,
            .section_heads = std::min(section_heads, heads),
            .last_first = last_first};
  }
  /// A CTA for each tile, which has rows that see many keys and rows that see few.
  static constexpr Schedule of_mixed(int heads, int tiles) {
    return {.blocks = heads * tiles, .heads = heads, .tiles = tiles, .mixed = true};
  }
  /// Heads of a section, by the bytes of a head's K and V, and `most` at most. Sections are about equal: the
  /// long tiles of a small last one would begin when other CTAs run out of work.
  static constexpr int section_of(int heads, std::int64_t head_bytes, int most) {
    const std::int64_t all_bytes = heads * head_bytes;
    std::int64_t sections = (heads + most - 1) / most;
    if (all_bytes > single_section_bytes) {
      sections = std::max(sections, (all_bytes + section_bytes - 1) / section_bytes);
      sections = std::min<std::int64_t>(sections, heads);
    }
    return static_cast<int>((heads + sections - 1) / sections);
  }

  constexpr int total() const { return heads * tiles; }
  /// Whether CTAs draw tiles from a counter, instead of striding over them.
  constexpr bool counted() const { return section_heads > 0 && total() > blocks; }
  /// Tiles per CTA with static striding.
  constexpr int rounds() const { return (total() + blocks - 1) / blocks; }

  /// The first of the 64 rows that a consumer owns of a tile, or `length_q` if there are none for it. The
  /// rows of a tile are consecutive, or mixed. Mixed: a head's pieces of 64 rows, from the longest to the
  /// shortest, are dealt to the tiles, one round for each consumer, every second round in reverse. So tiles
  /// take about equally long, which matters if each CTA has only one.
  constexpr int first_row(int tile, int consumer, int consumers, int length_q) const {
    if (!mixed) return (tile * consumers + consumer) * 64;
    const int number = consumer % 2 == 0 ? consumer * tiles + tile : (consumer + 1) * tiles - 1 - tile;
    const int part = (length_q + 63) / 64 - 1 - number;
    return part < 0 ? length_q : part * 64;
  }

  constexpr WorkTile work_tile(int index) const {
    if (section_heads == 0) {
      const int head = quotient(index, tiles);
      return {head, index - head * tiles};
    }
    const int first = quotient(index, section_heads * tiles) * section_heads;
    const int count = std::min(section_heads, heads - first);
    const int inside = index - first * tiles;
    const int tile = quotient(inside, count);
    return {first + inside - tile * count, last_first ? tiles - 1 - tile : tile};
  }
};

/// The number of tile indices of packed sequences: one for each `rows` rows and one more for each sequence.
/// That is enough for any lengths, and is known without reading them. Rows past the last sequence form one
/// more, which sees no key.
constexpr int packed_tiles(int total_rows, int sequences, int rows) {
  return total_rows / rows + sequences + 1;
}

}  // namespace tilewise::cuda::wgmma
