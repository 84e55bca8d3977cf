#pragma once

#include <algorithm>

#include "attention/call.h"

namespace tilewise::cuda {

/// A tile of a head. A launch has less than 2^31 blocks, so 32 bits are enough, and divide faster.
struct Turn {
  std::uint32_t head, tile;

  /// Which entry of the batch that is, where each has `heads`, and which head of it.
  struct Head {
    std::uint32_t b, h;
  };
  constexpr Head among(std::int64_t heads) const {
    const auto divisor = static_cast<std::uint32_t>(heads);
    return {head / divisor, head % divisor};
  }
};

/// The order in which blocks take the tiles of all heads. Heads come one after another, so that what they
/// read meets in the L2. But where some tiles have more to do than others, the n-th of a section of heads
/// come before the next of any: then, with the largest first, small ones fill the end.
struct Turns {
  std::uint32_t heads = 0;
  std::uint32_t tiles = 0;    ///< a head
  std::uint32_t section = 1;  ///< heads

  static constexpr bool uneven(const AttentionCall& call) {
    const bool left = call.band.left < Band::unbounded;
    const bool right = call.band.right < Band::unbounded;
    return left != right || call.packed();
  }

  static constexpr Turns of(const AttentionCall& call, std::int64_t heads, std::int64_t tiles) {
    Turns turns{static_cast<std::uint32_t>(heads), static_cast<std::uint32_t>(tiles)};
    if (uneven(call) && heads > 0) turns.section = turns.heads;
    return turns;
  }
  /// The same with sections that fit into the cache where a head's blocks share `head_bytes`, but have some
  /// blocks for every multiprocessor.
  static Turns of(const AttentionCall& call, std::int64_t heads, std::int64_t tiles, std::int64_t head_bytes,
                  int multiprocessors) {
    Turns turns = of(call, heads, tiles);
    if (turns.section == 1) return turns;
    constexpr std::int64_t cache_bytes = 32 << 20;
    const std::int64_t fitting = cache_bytes / std::max<std::int64_t>(head_bytes, 1);
    const std::int64_t enough = (2 * multiprocessors + tiles - 1) / std::max<std::int64_t>(tiles, 1);
    turns.section = static_cast<std::uint32_t>(std::clamp<std::int64_t>(std::max(fitting, enough), 1, heads));
    return turns;
  }

  constexpr Turn turn(std::uint32_t index) const {
    // The last section takes the heads that are left, too: with fewer heads, its largest tiles would end
    // late.
    const std::uint32_t sections = std::max(heads / section, 1u);
    const std::uint32_t n = std::min(index / (section * tiles), sections - 1);
    const std::uint32_t first = n * section;
    const std::uint32_t rest = index - first * tiles;
    const std::uint32_t together = n + 1 == sections ? heads - first : section;
    const std::uint32_t tile = rest / together;
    return {first + rest - tile * together, tile};
  }
};

}  // namespace tilewise::cuda
