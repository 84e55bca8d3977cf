#pragma once

#include "cuda/attention/sm90/forward/scores.cuh"

namespace tilewise::cuda::wgmma {

// Which elements of P dropout keeps. A Philox draw covers four keys of a query. Two neighbouring lanes hold
// two of these keys each, for two rows: each lane draws for one of the rows, and they exchange halves.
// (draw_four() of common/dropout.cuh is the same draw, but with it the compiler schedules these kernels
// differently.)

/// Bit 2j + e of word h is for element 4j + 2h + e of P.
using KeptScores = std::uint32_t[2];

/// `row` is the lane's row g, `key` the tile's first key, and `head` counts the heads of all batch entries.
template <ForwardConfig c>
__device__ __forceinline__ void draw_kept(KeptScores& kept, const DropoutMask& of_call, std::uint32_t head,
                                          int row, int key) {
  static_assert(c.keys / 4 <= 32);
  const DropoutMask dropout = of_call.drawn();
  const auto lane = static_cast<std::uint32_t>(lane_now());
  const bool odd = lane % 2 != 0;
  const auto own_row = static_cast<std::uint32_t>(odd ? row + 8 : row);
  std::uint32_t low = 0;   // bits of the even lane's two keys of four
  std::uint32_t high = 0;  // bits of the odd lane's
  // Draws per iteration. Unrolling all of 128 keys would take registers that S and O need. For 64 keys there
  // are enough, and a loop takes 1 to 3 % longer, unless O takes 128 registers.
  constexpr int together = c.keys > 64 ? 4 : c.dim_v > 128 ? 2 : c.keys / 8;
#pragma unroll 1
  for (int j = 0; j < c.keys / 8; j += together) {
    low >>= 2 * together;
    high >>= 2 * together;
#pragma unroll
    for (int n = 0; n < together; ++n) {
      const auto words = philox(
          {static_cast<std::uint32_t>(key) / 4 + 2 * (j + n) + lane % 4 / 2, own_row, head, dropout.stream},
          dropout.key);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const std::uint32_t bit = 1u << (32 - 2 * together + 2 * n + e);
        if (words[e] >= dropout.threshold) low |= bit;
        if (words[2 + e] >= dropout.threshold) high |= bit;
      }
    }
  }
  low >>= 32 - c.keys / 4;
  high >>= 32 - c.keys / 4;
  const std::uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
  kept[0] = odd ? other : low;
  kept[1] = odd ? high : other;
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
