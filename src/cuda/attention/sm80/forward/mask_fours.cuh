#pragma once

#include "cuda/attention/common/forward/scores.cuh"
#include "cuda/attention/sm80/forward/key_order.cuh"
#include "cuda/attention/sm80/forward/tuning.h"

namespace tilewise::cuda::mma {

// A mask's elements for the scores of a lane, which has keys in fours (KeyOrder). They are loaded before the
// products that they are added to, four at a time where they lie so.

/// Elements as they lie in memory, by row tile, row half, 16 keys: the first word of four booleans, two of 16
/// bits, four of 32.
template <ForwardConfig c>
using Fours = std::uint32_t[c.row_tiles][2][c.keys / 16][c.additive ? 4 : 1];

/// Loads elements of `size` bytes that are `stride` bytes apart in rows; `row(r, half)` is where the lane's
/// first key is. Keys from `count` on, which are hidden, get the element of the last before.
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

/// Hides the pairs whose boolean is false.
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

/// Adds what `bias(four, e)` makes of the words.
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
          score = own == minus_infinity ? own : __fadd_rn(score, own);  // whatever the score is
        }
      }
    }
  }
}

/// The mask and the block mask for the rows of a lane.
template <ForwardConfig c, typename T>
struct MaskRows {
  const AttentionCall& call;
  const QueryRows& rows;
  const Place<c> place;
  const std::byte* row[c.row_tiles][2];  ///< of the mask, at the lane's first key of the first tile there is
  int size;                              ///< of an element
  bool at_once;                          ///< fours from a multiple of 4 on lie side by side and aligned

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

  /// What is there to be loaded ahead for a tile of keys.
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
  /// What a block mask's tile shows of a tile of keys.
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
  /// Whether fours of elements that are `stride` apart in rows at multiples of `strides` lie so.
  static __device__ bool lie_at_once(const std::byte* data, int size, std::int64_t strides,
                                     std::int64_t stride) {
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
    return stride == 1 && ((address | strides * size) & (4 * size - 1)) == 0;
  }
};

}  // namespace tilewise::cuda::mma
