#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "attention/call.h"

namespace tilewise::cpu::simd {

inline constexpr int max_panel_width = 64;

/// The queries that are computed together: up to max_panel_width queries that share a key head, one per
/// vector lane. They are consecutive queries of one head or, for short sequences, queries of several heads of
/// a group (packed GQA).
struct Panel {
  std::int64_t b = 0;
  std::int64_t h_kv = 0;
  Sequence sequence;
  int rows = 0;   ///< queries
  int width = 0;  ///< `rows` rounded up to whole vectors
  // Lanes past `rows` repeat the last row, so that they stay in bounds. Their results are not used.
  alignas(64) std::int32_t head[max_panel_width];
  alignas(64) std::int32_t query[max_panel_width];
  alignas(64) std::int32_t first_key[max_panel_width];  ///< the band of each lane: [first_key, last_key)
  alignas(64) std::int32_t last_key[max_panel_width];
  KeyRange any;                                ///< from the first to the last key that some lane sees
  KeyRange all;                                ///< keys that every lane sees
  std::span<const std::int32_t> block_states;  ///< one per key block; empty without a block mask

  bool one_head() const { return head[0] == head[rows - 1]; }
};

/// Consecutive keys that are computed together.
struct KeyTile {
  std::int64_t first = 0;
  int count = 0;
  bool edge = false;                     ///< the band hides some key of the tile from some lane
  std::int32_t block_tile = block_full;  ///< tile of the block mask that hides keys inside, or block_full
};

/// Divides the queries of a problem into panels.
class PanelGrid {
 public:
  /// Panels of at most `width` queries. With `share_heads`, the heads of a group share panels if a head has
  /// fewer queries than a panel.
  PanelGrid(const AttentionCall& call, int width, bool share_heads)
      : call_(call), width_(width), blocks_(call.problem.features.block_mask) {
    const std::int64_t length = call.problem.length_q;
    shared_ = share_heads && !blocks_ && call.group() > 1 && length < width;
    if (blocks_) {
      panels_per_block_ = (call.blocks.block_q + width - 1) / width;
      panels_ = (length + call.blocks.block_q - 1) / call.blocks.block_q * panels_per_block_;
    } else {
      panels_ = ((shared_ ? length * call.group() : length) + width - 1) / width;
    }
  }

  /// The number of heads that have panels of their own: key heads if heads share panels, else query heads.
  std::int64_t heads() const { return shared_ ? call_.problem.heads_kv : call_.problem.heads_q; }
  std::int64_t panels() const { return panels_; }
  std::int64_t heads_per_kv() const { return shared_ ? 1 : call_.group(); }

  /// Fills `panel`. Returns false if it has no queries. `states` is memory for one state per key block.
  bool fill(Panel& panel, std::int64_t b, std::int64_t head, std::int64_t index, int lanes,
            std::span<std::int32_t> states) const {
    panel.b = b;
    panel.h_kv = shared_ ? head : head / call_.group();
    panel.sequence = call_.sequence(b);
    const std::int64_t length = panel.sequence.length_q;
    panel.block_states = {};
    std::int64_t first = index * width_;
    std::int64_t last = shared_ ? length * call_.group() : length;
    if (blocks_) {
      const std::int64_t block = index / panels_per_block_;
      first = block * call_.blocks.block_q + index % panels_per_block_ * width_;
      last = std::min(last, (block + 1) * call_.blocks.block_q);
      panel.block_states = states.first(static_cast<std::size_t>(call_.key_blocks()));
      if (first < last)
        call_.block_states(b, head, block, states.first(static_cast<std::size_t>(call_.key_blocks())));
    }
    if (first >= last) return false;
    panel.rows = static_cast<int>(std::min<std::int64_t>(width_, last - first));
    panel.width = (panel.rows + lanes - 1) / lanes * lanes;
    panel.any = {panel.sequence.length_k, 0};
    panel.all = {0, panel.sequence.length_k};
    for (int lane = 0; lane < panel.width; ++lane) {
      const std::int64_t row = first + std::min(lane, panel.rows - 1);
      const std::int64_t i = shared_ ? row % length : row;
      const KeyRange keys = call_.keys_of(panel.sequence, i);
      panel.head[lane] = static_cast<std::int32_t>(shared_ ? head * call_.group() + row / length : head);
      panel.query[lane] = static_cast<std::int32_t>(i);
      panel.first_key[lane] = static_cast<std::int32_t>(std::min(keys.first, panel.sequence.length_k));
      panel.last_key[lane] = static_cast<std::int32_t>(std::max<std::int64_t>(keys.last, 0));
      if (!keys.empty()) {
        panel.any = {std::min(panel.any.first, keys.first), std::max(panel.any.last, keys.last)};
      }
      panel.all = {std::max(panel.all.first, keys.first), std::min(panel.all.last, keys.last)};
    }
    return true;
  }

 private:
  const AttentionCall& call_;
  int width_;
  bool blocks_;
  bool shared_ = false;
  std::int64_t panels_ = 0;
  std::int64_t panels_per_block_ = 1;
};

/// Calls body(KeyTile) for every tile of at most `tile_keys` keys of `range` that some lane of the panel
/// sees, in ascending order. Tiles that the band or the block mask hides entirely are skipped.
template <typename Body>
void for_each_key_tile(const AttentionCall& call, const Panel& panel, KeyRange range, int tile_keys,
                       const Body& body) {
  const std::int64_t begin = std::max(range.first, panel.any.first);
  const std::int64_t end = std::min(range.last, panel.any.last);
  const auto emit = [&](std::int64_t first, std::int64_t last, std::int32_t block_tile) {
    for (std::int64_t j = first; j < last; j += tile_keys) {
      KeyTile tile{.first = j, .count = static_cast<int>(std::min<std::int64_t>(tile_keys, last - j))};
      tile.edge = j < panel.all.first || j + tile.count > panel.all.last;
      tile.block_tile = block_tile;
      body(tile);
    }
  };
  if (panel.block_states.empty()) return emit(begin, end, block_full);
  const std::int64_t size = call.blocks.block_k;
  for (std::int64_t block = begin / size; block * size < end;) {
    const std::int32_t state = panel.block_states[static_cast<std::size_t>(block)];
    std::int64_t next = block + 1;
    if (state == block_full) {  // following blocks that are full, too, form one run
      while (next * size < end && panel.block_states[static_cast<std::size_t>(next)] == block_full) ++next;
    }
    if (state != block_hidden) emit(std::max(begin, block * size), std::min(end, next * size), state);
    block = next;
  }
}

}  // namespace tilewise::cpu::simd
