#pragma once

#include "cuda/wgmma/scores.cuh"

namespace tilewise::cuda::wgmma {

// Which weights dropout keeps. Four keys of a query share a draw, and two lanes have two of them each, of two
// rows: one draws for the one row, the other for the other, and they exchange what they have for each other.

/// Of row half h, bit 2j + e for score 4j + 2h + e.
using KeptScores = std::uint32_t[2];

/// `row` is the lane's row g and `key` the tile's first; `head` counts those of all batch entries.
template <ForwardConfig c>
__device__ __forceinline__ void draw_kept(KeptScores& kept, const DropoutMask& of_call, std::uint32_t head,
                                          int row, int key) {
  static_assert(c.keys / 4 <= 32);
  const DropoutMask dropout = of_call.drawn();
  const auto lane = static_cast<std::uint32_t>(lane_now());
  const bool odd = lane % 2 != 0;
  const auto own_row = static_cast<std::uint32_t>(odd ? row + 8 : row);
  std::uint32_t low = 0;  // of the even lane's two keys of four
  std::uint32_t high = 0;
#pragma unroll
  for (int j = 0; j < c.keys / 8; ++j) {
    const auto words =
        philox({static_cast<std::uint32_t>(key) / 4 + 2 * j + lane % 4 / 2, own_row, head, dropout.stream},
               dropout.key);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (words[e] >= dropout.threshold) low |= 1u << (2 * j + e);
      if (words[2 + e] >= dropout.threshold) high |= 1u << (2 * j + e);
    }
  }
  const std::uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
  kept[0] = odd ? other : low;
  kept[1] = odd ? high : other;
}

/// Weights that are not kept become 0, once they are in the sums.
template <ForwardConfig c>
__device__ __forceinline__ void drop(Scores<c>& weights, const KeptScores& kept) {
#pragma unroll
  for (int n = 0; n < c.keys / 2; ++n) {
    if ((kept[n / 2 % 2] & (1u << (n / 4 * 2 + n % 2))) == 0) weights[n] = 0;
  }
}

}  // namespace tilewise::cuda::wgmma
