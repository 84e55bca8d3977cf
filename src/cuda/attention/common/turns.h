#pragma once

#include <algorithm>

#include "attention/call.h"

namespace tilewise::cuda {

/// A tile of a head. A launch has fewer than 2^31 CTAs, so 32 bits are enough, and they divide faster.
struct Turn {
  std::uint32_t head, tile;

  /// The batch entry and the head there, where each entry has `heads` heads.
  struct Head {
    std::uint32_t b, h;
  };
  constexpr Head among(std::int64_t heads) const {
    const auto divisor = static_cast<std::uint32_t>(heads);
    return {head / divisor, head % divisor};
  }
};

/// The order in which CTAs take the tiles of all heads. Heads come one after another, so that what the CTAs
/// of a head share stays in the L2. But where some tiles have more work than others, heads are grouped into
/// sections, and the n-th tiles of all heads of a section come before their next tiles: with the largest
/// tiles first, small ones fill the end.
struct Turns {
  std::uint32_t heads = 0;
  std::uint32_t tiles = 0;    ///< per head
  std::uint32_t section = 1;  ///< heads per section

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
  /// The same with sections that fit into the L2, where the CTAs of a head share `head_bytes`, but with at
  /// least two CTAs per SM.
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
    // The last section also takes the remaining heads: a section of fewer heads would have its largest tiles
    // at the end.
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
