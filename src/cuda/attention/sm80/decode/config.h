#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/attention/sm80/forward/split_kv.h"

namespace tilewise::cuda::mma {

/// The sizes of the decode kernel. A CTA takes the queries of a key head, with all its keys or one split of
/// them; its warps take 16 keys at a time in turn. Shared memory has room for one CTA per SM.
template <int warps_, int stages_>
struct DecodeConfig {
  static constexpr int warps = warps_;
  static constexpr int threads = warps * 32;
  static constexpr int keys = 16;                 ///< per step of a warp
  static constexpr int rows = 8;                  ///< queries of all heads that share keys, at most
  static constexpr int step_keys = warps * keys;  ///< of all warps
  /// Per warp. At head dim 128 a stage has 8 KB, K and V of a step; at 64 there are twice as many stages.
  static constexpr int ring_bytes = stages_ * 8192;
  static constexpr int sums_bytes = 2 * warps * rows * 4;
  static constexpr int shared_bytes = warps * ring_bytes + sums_bytes;

  static constexpr int tile_bytes(int dim) { return keys * dim * 2; }
  static constexpr int stages(int dim) { return ring_bytes / (2 * tile_bytes(dim)); }
};

/// For GPUs whose CTAs may have 193 KB of shared memory, tuned on an H200.
using LargeDecode = DecodeConfig<8, 3>;
/// For the others. It has 96.25 KB, which fits into the 99 KB of 8.6, 8.9 and 12.0. Not timed there.
using SmallDecode = DecodeConfig<4, 3>;

/// The number of splits with the least time, where CTAs run in rounds and each takes the time of its keys and
/// of 256 more: for its start, for filling the rings, and for its share of the combine kernel.
constexpr int decode_split_count(std::int64_t key_heads, std::int64_t keys, int multiprocessors) {
  constexpr std::int64_t constant_keys = 256;
  constexpr std::int64_t least_keys = LargeDecode::step_keys;
  const auto most = static_cast<int>(std::clamp<std::int64_t>(keys / least_keys, 1, most_splits));
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  int chosen = 1;
  for (int count = 1; count <= most && key_heads * count <= 8 * std::int64_t{multiprocessors}; ++count) {
    const std::int64_t rounds = (key_heads * count + multiprocessors - 1) / multiprocessors;
    const std::int64_t time = rounds * ((keys + count - 1) / count + constant_keys);
    if (time < least) {
      least = time;
      chosen = count;
    }
  }
  return chosen;
}

}  // namespace tilewise::cuda::mma
