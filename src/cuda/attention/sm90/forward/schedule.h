#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewise::cuda::wgmma {

/// What a section's keys and values may take, of an L2 that has 50 MB and more, and reads through it besides;
/// and what those of all heads may that make one section.
inline constexpr std::int64_t section_bytes = 16 << 20;
inline constexpr std::int64_t single_section_bytes = 40 << 20;

/// The heads of a section where there is a window: of few heads many tiles are computed at a time, and those
/// beside each other see the same keys.
inline constexpr int window_heads = 8;

/// Of numbers that are not negative: a division without a sign takes fewer instructions.
constexpr int quotient(int number, int divisor) {
  return static_cast<int>(static_cast<unsigned>(number) / static_cast<unsigned>(divisor));
}

/// A tile of queries: tile `tile` of head `head`, heads of all batch entries counted.
struct Turn {
  int head = 0;
  int tile = 0;
};

/// In which order tiles are computed, by as many blocks as there are multiprocessors.
///
/// Where tiles are equal, a block takes every blocks-th of them, heads one after another, so that blocks that
/// run together share keys in the L2. Where later queries see more keys, or a head's last tile has few
/// queries, a block that is done takes the next (turns.cuh): sections of heads come one after another, and in
/// a section the longest tiles of all its heads first, so that short ones fill the end. A section has as many
/// heads as keep their keys and values in the L2 until shorter tiles read them again.
struct Schedule {
  int blocks = 1;
  int heads = 0;           ///< of all batch entries
  int tiles = 0;           ///< a head
  int section_heads = 0;   ///< 0: tiles are equal
  bool last_first = true;  ///< in a section: a head's last tile is the longest, not the shortest
  bool mixed = false;      ///< a tile has long and short rows, see first_row

  static constexpr Schedule of(int multiprocessors, int heads, int tiles, int section_heads = 0,
                               bool last_first = true) {
    return {.blocks = std::min(heads * tiles, multiprocessors),
            .heads = heads,
            .tiles = tiles,
            .section_heads = std::min(section_heads, heads),
            .last_first = last_first};
  }
  /// A block for each tile, of rows that see many keys and few.
  static constexpr Schedule of_mixed(int heads, int tiles) {
    return {.blocks = heads * tiles, .heads = heads, .tiles = tiles, .mixed = true};
  }
  /// Heads of a section, by the bytes of a head's keys and values, and `most` at most. Sections are about
  /// equal: long tiles of a small last one would begin when other blocks run out of work.
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
  /// Whether blocks take what is next instead of every blocks-th.
  constexpr bool counted() const { return section_heads > 0 && total() > blocks; }
  /// Tiles a block, of equal ones.
  constexpr int rounds() const { return (total() + blocks - 1) / blocks; }

  /// The first of the 64 rows that a consumer has of a tile, or `length_q` where there are none for it. Rows
  /// of a tile lie together, or are mixed: of a head's parts of 64, from the longest to the shortest, the
  /// consumers take the next of all tiles in turn, there and back. So tiles are about equal where each block
  /// has but one.
  constexpr int first_row(int tile, int consumer, int consumers, int length_q) const {
    if (!mixed) return (tile * consumers + consumer) * 64;
    const int number = consumer % 2 == 0 ? consumer * tiles + tile : (consumer + 1) * tiles - 1 - tile;
    const int part = (length_q + 63) / 64 - 1 - number;
    return part < 0 ? length_q : part * 64;
  }

  constexpr Turn turn(int index) const {
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

/// Packed sequences have numbers for tiles by where they begin, a tile for each `rows` rows and one more a
/// sequence: enough, whatever the lengths, and how many there are is known without reading them. Rows behind
/// the last are one more sequence, which sees nothing.
constexpr int packed_tiles(int total_rows, int sequences, int rows) {
  return total_rows / rows + sequences + 1;
}

}  // namespace tilewise::cuda::wgmma
