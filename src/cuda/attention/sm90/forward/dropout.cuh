#pragma once

#include "cuda/attention/sm90/forward/scores.cuh"

namespace tilewise::cuda::wgmma {

// Which elements of P dropout keeps. A Philox draw covers eight keys of a query. Four neighbouring lanes hold
// these keys, two each, for two rows. Of 16 keys each lane draws eight for one of the rows, and they exchange
// their bits.

/// Bit 2j + e of word h is for element 4j + 2h + e of P.
using KeptScores = std::uint32_t[2];

/// `row` is the lane's row g, `key` the tile's first key, and `head` counts the heads of all batch entries.
template <ForwardConfig c>
__device__ __forceinline__ void draw_kept(KeptScores& kept, const DropoutMask& of_call, std::uint32_t head,
                                          int row, int key) {
  constexpr int draws = c.keys / 16;  // per lane
  constexpr int words = (draws + 3) / 4;
  static_assert(c.keys % 16 == 0 && words <= 2);
  const DropoutMask dropout = of_call.drawn();
  const auto lane = static_cast<std::uint32_t>(lane_now());
  const auto own_row = static_cast<std::uint32_t>(row + lane % 2 * 8);
  const std::uint32_t own_eight = static_cast<std::uint32_t>(key) / 8 + lane % 4 / 2;
  std::uint32_t drawn[words] = {};
  // Draws per iteration. Unrolling all of 128 keys would take registers that S and O need. For 64 keys there
  // are enough, and a loop takes longer, unless O takes 128 registers.
  constexpr int together = c.keys > 64 ? 2 : c.dim_v > 128 ? 1 : draws;
  static_assert(draws % together == 0);
#pragma unroll
  for (int word = 0; word < words; ++word) {
    constexpr int most = draws < 4 ? draws : 4;
#pragma unroll 1
    for (int n = 0; n < most; n += together) {
      drawn[word] >>= 8 * together % 32;
#pragma unroll
      for (int m = 0; m < together; ++m) {
        const auto numbers = philox(
            {own_eight + 2 * static_cast<std::uint32_t>(4 * word + n + m), own_row, head, dropout.stream},
            dropout.key);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const std::uint32_t bit = 1u << (32 - 8 * together + 8 * m + e);
          if (DropoutMask::half(numbers[e % 4], e) >= dropout.threshold) drawn[word] |= bit;
        }
      }
    }
    drawn[word] >>= 32 - 8 * most;
  }
  kept[0] = kept[1] = 0;
#pragma unroll
  for (int other = 0; other < 4; ++other) {  // it has the rows g + 8h and every other eight keys
#pragma unroll
    for (int word = 0; word < words; ++word) {
      const std::uint32_t theirs = __shfl_sync(~0u, drawn[word], lane / 4 * 4 + other);
      // From two bits of every eight to two bits of every four.
      std::uint32_t own = theirs >> lane % 4 * 2 & 0x03030303u;
      own = (own | own >> 4) & 0x00330033u;
      own = (own | own >> 8) & 0x3333u;
      kept[other % 2] |= own << (16 * word + other / 2 * 2);
    }
  }
}

/// Zeroes the elements of P that are dropped, after P was added to the row sums.
template <ForwardConfig c>
__device__ __forceinline__ void drop(Scores<c>& p, const KeptScores& kept) {
#pragma unroll
  for (int n = 0; n < c.keys / 2; ++n) {
    if ((kept[n / 2 % 2] & (1u << (n / 4 * 2 + n % 2))) == 0) p[n] = 0;
  }
}

}  // namespace tilewise::cuda::wgmma
