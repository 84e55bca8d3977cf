#pragma once

#include "cuda/attention/sm80/forward/mask_fours.cuh"

namespace tilewise::cuda::mma {

// Between a product q·k and its weight in the general kernel: what hides a pair or changes its score, and
// dropout.

/// Products to scores in natural units, in place. What a call does not have is passed over by all lanes at
/// once. Every step is rounded by itself, as score_of() has it. `fours` is what was loaded ahead: the mask's,
/// or without a mask the block mask's.
template <ForwardConfig c, typename T>
__device__ __forceinline__ void make_scores(const AttentionCall& call, const ScoreRule& rules,
                                            const QueryRows& rows, const KeyTile& keys, bool edge,
                                            const Place<c>& place, const MaskRows<c, T>& mask,
                                            const Fours<c>& fours, Scores<c>& s) {
  using View = FoursView<c.row_tiles, c.keys / 8>;
  const int own = KeyOrder::first(place.lane);
  scale_and_cap<View>(s, rules.scale, rules.softcap, rules.cap);
  if (rules.alibi) {
    const QueryTile& queries = rows.queries;
    int distance[View::queries];
    float slope[View::queries];
#pragma unroll
    for (int q = 0; q < View::queries; ++q) {
      const int row = min(place.row(q / 2, q % 2), rows.count() - 1);
      const std::int64_t i = queries.first + rows.query(row);
      distance[q] =
          static_cast<int>(i + queries.sequence.length_k - queries.sequence.length_q - keys.first - own);
      slope[q] =
          rows.heads > 1 ? static_cast<float>(call.alibi_slopes.at(queries.b, rows.head(row))) : rules.slope;
    }
    add_alibi<View>(s, [&](int q) { return slope[q]; }, [&](int q) { return distance[q]; });
  }
  if (rules.mask) mask.add(fours, s);
  if (edge) hide<c, View>(call, rows, keys, place, own, s);
  if (keys.tile >= 0) {
    if (!rules.mask) return hide_fours<c>(fours, s);
    Fours<c> shown;
    mask.load_shown(shown, keys);
    hide_fours<c>(shown, s);
  }
}

/// What dropout keeps of a lane's pairs in a tile of keys.
template <ForwardConfig c>
struct DropoutRows {
  DropoutMask mask;
  std::uint32_t query[c.row_tiles][2], head[c.row_tiles][2];
  std::uint32_t first;  ///< the lane's first key

  __device__ DropoutRows(const AttentionCall& call, const DropoutMask& drawn, const QueryRows& rows,
                         const Place<c>& place, const KeyTile& keys)
      : first(static_cast<std::uint32_t>(keys.first + KeyOrder::first(place.lane))) {
    mask.key = {uniform(drawn.key.low), uniform(drawn.key.high)};
    mask.stream = uniform(drawn.stream);
    mask.threshold = uniform(drawn.threshold);
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = place.row(r, half);
        query[r][half] = static_cast<std::uint32_t>(rows.queries.first + rows.query(row));
        head[r][half] = static_cast<std::uint32_t>(rows.queries.b * call.problem.heads_q + rows.head(row));
      }
    }
  }
  /// The bits of the weights of one step of 16 keys that it keeps. The factor of those is joined at the end,
  /// so that they stay the numbers whose sum they are divided by. The four of a lane share a draw.
  __device__ __forceinline__ void keep(Weights<c>& bits, int step) const {
    const std::uint32_t four = first / 4 + 4 * static_cast<std::uint32_t>(step);
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeptFour kept = draw_four(mask, four, query[r][half], head[r][half]);
        bits[r][half] = two(kept.keeps[0], kept.keeps[1]);
        bits[r][2 + half] = two(kept.keeps[2], kept.keeps[3]);
      }
    }
  }
  /// The same where the first key is not a multiple of 4: in a window, or a block mask of odd sizes.
  __device__ __forceinline__ void keep_singly(Weights<c>& bits, int step) const {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned kept = 0;
#pragma unroll 1
        for (unsigned n = 0; n < 4; ++n) {
          const std::uint32_t j = first + 16 * static_cast<std::uint32_t>(step) + n;
          const KeptFour four = draw_four(mask, j / 4, query[r][half], head[r][half]);
          const bool low = j % 2 == 0 ? four.keeps[0] : four.keeps[1];
          const bool high = j % 2 == 0 ? four.keeps[2] : four.keeps[3];
          kept |= (j % 4 < 2 ? low : high) ? 1u << n : 0u;
        }
        bits[r][half] = two((kept & 1) != 0, (kept & 2) != 0);
        bits[r][2 + half] = two((kept & 4) != 0, (kept & 8) != 0);
      }
    }
  }

 private:
  static __device__ std::uint32_t two(bool low, bool high) {
    return (low ? 0xFFFFu : 0u) | (high ? 0xFFFF0000u : 0u);
  }
  static __device__ std::uint32_t uniform(std::uint32_t x) { return __shfl_sync(~0u, x, 0); }
};

}  // namespace tilewise::cuda::mma
