#pragma once

#include <cuda.h>

#include <algorithm>

#include "attention/call.h"
#include "cuda/wgmma/schedule.h"
#include "cuda/wgmma/tuning.h"

namespace tilewise::cuda::wgmma {

/// Tiles of keys [first, last).
struct TileSpan {
  int first = 0;
  int last = 0;
  constexpr int count() const { return last - first; }
};

/// The keys that queries see, as the call has it, in 32 bits.
struct BandOfKeys {
  /// Lengths below it and what a band is cut to: sums of three of them fit.
  static constexpr int most = 1 << 29;

  int length_q = 0;
  int length_k = 0;
  int left = 0;  ///< a query at p sees keys p - left up to p + right
  int right = 0;
  int offset = 0;  ///< query i stands at key i + offset

  static BandOfKeys of(const AttentionCall& call) {
    const auto cut = [](std::int64_t side) {
      return static_cast<int>(std::min<std::int64_t>(side, 2 * std::int64_t{most} - 2));
    };
    const Sequence sequence = call.sequence(0);
    return {.length_q = static_cast<int>(sequence.length_q),
            .length_k = static_cast<int>(sequence.length_k),
            .left = cut(call.band.left),
            .right = cut(call.band.right),
            .offset = static_cast<int>(sequence.band_offset)};
  }

  constexpr int first(int query) const { return std::max(0, query + offset - left); }
  constexpr int last(int query) const { return std::min(length_k, query + offset + right + 1); }

  /// Tiles of `keys` that any of queries [begin, end) sees something of; count 0 where there are none.
  constexpr TileSpan tiles(int begin, int end, int keys) const {
    if (begin >= end || first(begin) >= last(end - 1)) return {};
    return {first(begin) / keys, (last(end - 1) + keys - 1) / keys};
  }
};

/// What blocks count by where a block that is done takes the next tile: a word of the workspace, and a number
/// that no other launch has.
struct TurnCounter {
  unsigned long long* word = nullptr;
  std::uint32_t owner = 0;
};

/// What the kernel reads, beside the tensors' maps.
struct ForwardArguments {
  Schedule schedule;
  TurnCounter counter;
  BandOfKeys band;
  int heads_q = 0;
  int group = 1;  ///< query heads that share a key head
  int dim_v = 0;
  float scale = 1;
  float scale_log2 = 1;  ///< scale·log2 e
  bool aligned_o = false;
  Rows o, lse;
};

/// q, k and v as boxes of one panel: 64 queries, or the keys of a tile.
struct ForwardMaps {
  CUtensorMap q, k, v;
};

}  // namespace tilewise::cuda::wgmma
