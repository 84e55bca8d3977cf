#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tilewise/attention.h"
#include "tilewise/error.h"

#pragma GCC visibility push(default)
namespace tilewise {

// Masks by ranges. A mask is a list of slices; a query sees a key if one of the slices shows it. Slices may
// overlap. Attention takes the block mask that `make_block_lists` makes of them, without ever writing the
// mask element by element: the work grows with the blocks that are kept, and only blocks that a range cuts
// have elements.

/// Queries [q_begin, q_end) see keys [k_begin, k_end), as far as lowest ≤ j − i ≤ highest for query i and key
/// j. These two bounds are diagonals of the score matrix: with highest = k_begin − q_begin a square slice is
/// causal, with both a slice is a window.
struct MaskSlice {
  static constexpr std::int64_t unbounded = std::int64_t{1} << 32;  ///< beyond every difference of positions
  std::int64_t q_begin = 0;
  std::int64_t q_end = 0;
  std::int64_t k_begin = 0;
  std::int64_t k_end = 0;
  std::int64_t lowest = -unbounded;
  std::int64_t highest = unbounded;
  std::int64_t mask = 0;  ///< which one it belongs to, where several are made together
};

/// What the slices are cut into. A block that is longer than the queries or keys counts as long as they are.
struct BlockGrid {
  std::int64_t masks = 1;
  std::int64_t length_q = 0;
  std::int64_t length_k = 0;
  std::int64_t block_q = 128;
  std::int64_t block_k = 128;
};

/// A block mask with its memory. Equal tiles are stored once, one bit an element. Lists are in rising order
/// of key blocks.
struct BlockLists {
  std::int64_t masks = 0;
  std::int64_t rows = 0;   ///< of query blocks, in each mask
  std::int64_t slots = 0;  ///< at least 1, as of full ones and of tiles
  std::int64_t full_slots = 0;
  std::int64_t block_q = 0;
  std::int64_t block_k = 0;
  std::vector<std::int32_t> counts;        ///< [masks, rows]
  std::vector<std::int32_t> indices;       ///< [masks, rows, slots]
  std::vector<std::int32_t> full_counts;   ///< [masks, rows]
  std::vector<std::int32_t> full_indices;  ///< [masks, rows, full_slots]
  std::vector<std::int32_t> tile_ids;      ///< [masks, rows, slots]
  /// [tiles, block_q, words]: bit j mod 64 of word j / 64 says whether a query sees key j of the block.
  std::vector<std::uint64_t> tile_bits;

  std::int64_t row_words() const { return (block_k + 63) / 64; }
  std::int64_t tile_count() const;
  /// Writes the tiles as attention takes them: bytes [tiles, block_q, block_k], 1 where a key is seen.
  void write_tiles(std::uint8_t* elements) const;
  /// A view for `AttentionInputs::blocks`: mask n is that of batch entry n, or the only one of all entries.
  /// `tiles` is what `write_tiles` wrote, and lives as long as the view.
  BlockMask view(std::uint8_t* tiles);
};

/// Throws InvalidArgument where a slice is outside the grid.
BlockLists make_block_lists(std::span<const MaskSlice> slices, const BlockGrid& grid);

namespace masks {

/// Documents one after another, each of which sees itself alone; causal: its tokens see no later ones.
/// Packed sequences say the same without a mask, where rows lie so that they can (`PackedSequences`).
std::vector<MaskSlice> documents(std::span<const std::int64_t> lengths, bool causal);

/// The first `prefix` tokens of `length` see one another, and all others see them and what came before:
/// the mask of a prefix language model.
std::vector<MaskSlice> prefix(std::int64_t length, std::int64_t prefix);

/// A prompt and, after it, responses. All are causal; a response sees the prompt and itself alone.
std::vector<MaskSlice> shared_prompt(std::int64_t prompt, std::span<const std::int64_t> responses);

/// Blocks of `block` tokens: a token sees its own block and all before it.
std::vector<MaskSlice> block_causal(std::int64_t length, std::int64_t block);

/// Points of a grid in row-major order (a sequence, an image, a video). A point sees the box of `kernel`
/// points around it. At an edge the box is moved inside, so that all points see equally many. Of an even
/// kernel more is before the point than after it.
std::vector<MaskSlice> neighbourhood(std::span<const std::int64_t> extents,
                                     std::span<const std::int64_t> kernel);

}  // namespace masks
}  // namespace tilewise
#pragma GCC visibility pop
