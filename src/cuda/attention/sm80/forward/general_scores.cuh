#pragma once

#include "cuda/attention/common/forward/scores.cuh"
#include "cuda/attention/sm80/forward/key_order.cuh"
#include "cuda/attention/sm80/forward/tuning.h"

namespace tilewise::cuda::mma {

// From a product q·k to its score in the general kernel, and dropout.

// The elements of a mask for a lane's scores. A lane has keys in fours (KeyOrder), and loads the elements of
// four keys at once where they are contiguous. They are loaded before the products to which they are added.

/// Elements of a mask as in memory, by row tile, row half and 16 keys: one word has four booleans, two words
/// four elements of 16 bits, and four words four of 32 bits.
template <ForwardConfig c>
using Fours = std::uint32_t[c.row_tiles][2][c.keys / 16][c.additive ? 4 : 1];

/// Loads elements of `size` bytes that are `stride` bytes apart within a row. `row(r, half)` points at the
/// element of the lane's first key. Keys from `count` on, which are hidden, get the element of the last key
/// before them.
template <int size, ForwardConfig c, typename Row>
__device__ __forceinline__ void load_fours(Fours<c>& fours, const Row& row, std::int64_t stride, bool at_once,
                                           int count) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::byte* from = row(r, half);
#pragma unroll
      for (int n = 0; n < c.keys / 16; ++n) {
        auto& four = fours[r][half][n];
        if (at_once) {
          const std::byte* at = from + 16 * n * size;
          if constexpr (size == 4) {
            const uint4 words = __ldg(reinterpret_cast<const uint4*>(at));
            four[0] = words.x;
            four[1] = words.y;
            four[2] = words.z;
            four[3] = words.w;
          } else if constexpr (size == 2) {
            const uint2 words = __ldg(reinterpret_cast<const uint2*>(at));
            four[0] = words.x;
            four[1] = words.y;
          } else {
            four[0] = __ldg(reinterpret_cast<const std::uint32_t*>(at));
          }
          continue;
        }
        const auto at = [&](int e) { return from + min(16 * n + e, count - 1) * stride; };
        if constexpr (size == 4) {
#pragma unroll
          for (int e = 0; e < 4; ++e) four[e] = __ldg(reinterpret_cast<const std::uint32_t*>(at(e)));
        } else if constexpr (size == 2) {
#pragma unroll
          for (int e = 0; e < 4; e += 2) {
            const std::uint32_t low = __ldg(reinterpret_cast<const std::uint16_t*>(at(e)));
            const std::uint32_t high = __ldg(reinterpret_cast<const std::uint16_t*>(at(e + 1)));
            four[e / 2] = low | high << 16;
          }
        } else {
          std::uint32_t word = 0;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            word |= std::uint32_t{__ldg(reinterpret_cast<const std::uint8_t*>(at(e)))} << (8 * e);
          }
          four[0] = word;
        }
      }
    }
  }
}

/// Hides the scores whose boolean is false.
template <ForwardConfig c>
__device__ __forceinline__ void hide_fours(const Fours<c>& fours, Scores<c>& s) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < c.keys / 16; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if ((fours[r][half][n][0] & 0xFFu << (8 * e)) == 0) {
            s[r][2 * n + e / 2][2 * half + e % 2] = minus_infinity;
          }
        }
      }
    }
  }
}

/// Adds `bias(four, e)`, which reads element e from the words of four keys.
template <ForwardConfig c, typename Bias>
__device__ __forceinline__ void add_fours(const Fours<c>& fours, Scores<c>& s, const Bias& bias) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < c.keys / 16; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& score = s[r][2 * n + e / 2][2 * half + e % 2];
          const float own = bias(fours[r][half][n], e);
          score = own == minus_infinity ? own : __fadd_rn(score, own);  // hides a NaN, too
        }
      }
    }
  }
}

/// The rows of the mask and of the block mask for the rows of a lane.
template <ForwardConfig c, typename T>
struct MaskRows {
  const AttentionCall& call;
  const QueryRows& rows;
  const Place<c> place;
  const std::byte* row[c.row_tiles][2];  ///< of the mask, at the lane's first key of the tile at key 0
  int size;                              ///< of an element, in bytes
  bool at_once;  ///< elements of four keys from a multiple of 4 on are contiguous and aligned

  __device__ MaskRows(const AttentionCall& call_, const QueryRows& rows_, const Place<c>& place_)
      : call(call_), rows(rows_), place(place_) {
    const MaskView& mask = call.mask;
    if (call.problem.features.mask == MaskKind::none) return;
    size = static_cast<int>(size_of(mask.dtype));
    at_once = lie_at_once(mask.data, size, mask.stride[0] | mask.stride[1] | mask.stride[2], mask.stride[3]);
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = min(place.row(r, half), rows.count() - 1);
        row[r][half] = mask.at(rows.queries.b, rows.head(own), rows.queries.first + rows.query(own),
                               KeyOrder::first(place.lane));
      }
    }
  }

  /// Loads the elements for a K tile ahead of its scores.
  __device__ __forceinline__ void load(Fours<c>& fours, const KeyTile& keys) const {
    if (call.problem.features.mask == MaskKind::none) {
      if (keys.tile >= 0) load_shown(fours, keys);
      return;
    }
    const std::int64_t stride = call.mask.stride[3] * size;
    const auto from = [&](int r, int half) { return row[r][half] + keys.first * stride; };
    const bool whole = at_once && keys.count == c.keys && keys.first % 4 == 0;
    const int count = keys.count - KeyOrder::first(place.lane);
    const auto load_as = [&]<int bytes>() {
      whole ? load_fours<bytes, c>(fours, from, stride, true, count)
            : load_fours<bytes, c>(fours, from, stride, false, count);
    };
    if constexpr (c.additive) {
      if (size == 4) return load_as.template operator()<4>();
      if (size == 2) return load_as.template operator()<2>();
    }
    load_as.template operator()<1>();
  }
  /// Loads what the block mask's tile shows of a K tile.
  __device__ __forceinline__ void load_shown(Fours<c>& fours, const KeyTile& keys) const {
    const BlockView& blocks = call.blocks;
    const auto first =
        static_cast<std::uint32_t>(rows.queries.first) % static_cast<std::uint32_t>(blocks.block_q);
    const std::uint32_t key =
        static_cast<std::uint32_t>(keys.first) % static_cast<std::uint32_t>(blocks.block_k);
    const int own = KeyOrder::first(place.lane);
    const std::byte* tile =
        blocks.tiles + keys.tile * blocks.tile_stride[0] + (key + own) * blocks.tile_stride[2];
    const auto from = [&](int r, int half) {
      return tile + (first + min(place.row(r, half), rows.count() - 1)) * blocks.tile_stride[1];
    };
    const bool whole =
        keys.count == c.keys && key % 4 == 0 &&
        lie_at_once(blocks.tiles, 1, blocks.tile_stride[0] | blocks.tile_stride[1], blocks.tile_stride[2]);
    whole ? load_fours<1, c>(fours, from, blocks.tile_stride[2], true, keys.count - own)
          : load_fours<1, c>(fours, from, blocks.tile_stride[2], false, keys.count - own);
  }
  /// Adds the mask's elements, or hides by them.
  __device__ __forceinline__ void add(const Fours<c>& fours, Scores<c>& s) const {
    if constexpr (c.additive) {
      if (call.problem.features.mask == MaskKind::additive) return add_as(fours, s);
    }
    hide_fours<c>(fours, s);
  }

 private:
  __device__ __forceinline__ void add_as(const Fours<c>& fours, Scores<c>& s) const {
    if (size == 4) {
      add_fours<c>(fours, s, [](const auto& four, int e) { return __uint_as_float(four[e]); });
    } else {
      add_fours<c>(fours, s, [](const auto& four, int e) {
        const float2 two = unpack<T>(four[e / 2]);
        return e % 2 == 0 ? two.x : two.y;
      });
    }
  }
  /// Whether elements that are `stride` apart, in rows at multiples of `strides`, can be loaded four at a
  /// time.
  static __device__ bool lie_at_once(const std::byte* data, int size, std::int64_t strides,
                                     std::int64_t stride) {
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
    return stride == 1 && ((address | strides * size) & (4 * size - 1)) == 0;
  }
};

/// Turns products into scores in natural units, in place. All lanes branch alike around the features that a
/// call does not have. Every step is rounded by itself, as in score_of(). `fours` was loaded ahead: the
/// elements of the mask or, without a mask, of the block mask.
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

/// What dropout keeps of a lane's P in a K tile.
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
  /// The bits of P that dropout keeps, for one step of 16 keys. O is multiplied by keep_scale at the end, so
  /// that P stays what its row sum is made of. The four keys of a lane share a draw.
  __device__ __forceinline__ void keep(Probabilities<c>& bits, int step) const {
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
  /// The same where the first key is not a multiple of 4, as in a window, or a block mask of odd sizes.
  __device__ __forceinline__ void keep_singly(Probabilities<c>& bits, int step) const {
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
