#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tilewise/attention.h"
#include "tilewise/error.h"

#pragma GCC visibility push(default)
namespace tilewise {

// Masks by ranges. A mask is a list of slices; a query sees a key if one of the slices shows it. Slices may
// overlap. `make_block_lists` turns them into a block mask for attention without writing the whole mask: its
// work grows with the number of visible blocks, and it writes elements only for blocks that are visible in
// part.

/// Query i of [q_begin, q_end) sees key j of [k_begin, k_end) if lowest ≤ j − i ≤ highest. The two bounds are
/// diagonals of the score matrix: with highest = k_begin − q_begin a square slice is causal, and with both
/// bounds a slice is a window.
struct MaskSlice {
  static constexpr std::int64_t unbounded = std::int64_t{1} << 32;  ///< more than any difference of positions
  std::int64_t q_begin = 0;
  std::int64_t q_end = 0;
  std::int64_t k_begin = 0;
  std::int64_t k_end = 0;
  std::int64_t lowest = -unbounded;
  std::int64_t highest = unbounded;
  std::int64_t mask = 0;  ///< the mask to which the slice belongs, if there are several
};

/// The blocks into which a mask is divided. A block size above the number of queries or keys counts as that
/// number.
struct BlockGrid {
  std::int64_t masks = 1;
  std::int64_t length_q = 0;
  std::int64_t length_k = 0;
  std::int64_t block_q = 128;
  std::int64_t block_k = 128;
};

/// A block mask that owns its memory. Equal tiles are stored once, with one bit per element. Lists are in
/// ascending order of key blocks.
struct BlockLists {
  std::int64_t masks = 0;
  std::int64_t rows = 0;   ///< rows of query blocks in each mask
  std::int64_t slots = 0;  ///< at least 1, like full_slots and the number of tiles
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
  /// Writes the tiles in the form that attention takes: bytes [tiles, block_q, block_k], 1 where a key is
  /// visible.
  void write_tiles(std::uint8_t* elements) const;
  /// A view for `AttentionInputs::blocks`. Mask n belongs to batch entry n; a single mask belongs to all
  /// entries. `tiles` is the memory that `write_tiles` filled. It must live as long as the view.
  BlockMask view(std::uint8_t* tiles);
};

/// Throws InvalidArgument if a slice is outside the grid.
BlockLists make_block_lists(std::span<const MaskSlice> slices, const BlockGrid& grid);

namespace masks {

/// Documents one after another. A token sees its own document; with `causal`, no later tokens of it. Where q,
/// k and v are packed, `PackedSequences` says the same without a mask.
std::vector<MaskSlice> documents(std::span<const std::int64_t> lengths, bool causal);

/// The mask of a prefix language model: the first `prefix` of `length` tokens see one another, and every
/// later token sees the prefix, itself and the tokens before it.
std::vector<MaskSlice> prefix(std::int64_t length, std::int64_t prefix);

/// A prompt, followed by several responses to it. All are causal. A response sees the prompt and itself.
std::vector<MaskSlice> shared_prompt(std::int64_t prompt, std::span<const std::int64_t> responses);

/// Blocks of `block` tokens: a token sees its own block and all blocks before it.
std::vector<MaskSlice> block_causal(std::int64_t length, std::int64_t block);

/// Neighbourhood attention: the points of a grid (a sequence, an image, a video) in row-major order. A point
/// sees the box of `kernel` points around it. At an edge the box is moved inside, so that all points see
/// equally many. An even kernel has one point more before its centre than after it.
std::vector<MaskSlice> neighbourhood(std::span<const std::int64_t> extents,
                                     std::span<const std::int64_t> kernel);

}  // namespace masks
}  // namespace tilewise
#pragma GCC visibility pop
