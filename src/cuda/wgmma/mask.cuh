#pragma once

#include "cuda/tile/element.cuh"
#include "cuda/wgmma/scores.cuh"

namespace tilewise::cuda::wgmma {

// What a mask adds to a tile's scores, read from memory straight to where scores are, while the tensor cores
// make these. A row's values are in four lanes, 8j + 2t and 8j + 2t + 1 in lane t. Read like that, an
// instruction would touch eight rows for 16 bytes of each; so a lane reads eight keys that lie together where
// it can, and the four lanes exchange them.

/// In natural units and in the order of scores.
template <ForwardConfig c>
using MaskValues = float[c.masked ? c.keys / 2 : 1];

__device__ __forceinline__ float mask_value(std::byte shown) {
  return shown == std::byte{0} ? minus_infinity : 0.0f;
}
__device__ __forceinline__ float mask_value(float x) { return x; }
__device__ __forceinline__ float mask_value(__half x) { return widen(x); }
__device__ __forceinline__ float mask_value(__nv_bfloat16 x) { return widen(x); }

/// Of four words a lane, word t of lanes 0 to 3 goes to lane t: two exchanges, each of half of the words.
__device__ __forceinline__ void turn_words(std::uint32_t (&words)[4], int lane) {
  const bool upper = (lane & 2) != 0;
  const bool odd = (lane & 1) != 0;
  const std::uint32_t other0 = __shfl_xor_sync(~0u, upper ? words[0] : words[2], 2);
  const std::uint32_t other1 = __shfl_xor_sync(~0u, upper ? words[1] : words[3], 2);
  // Of the lower two lanes, then of the upper two: the two words that this lane or its neighbour wants.
  const std::uint32_t low[2] = {upper ? other0 : words[0], upper ? other1 : words[1]};
  const std::uint32_t high[2] = {upper ? words[2] : other0, upper ? words[3] : other1};
  const std::uint32_t low_other = __shfl_xor_sync(~0u, odd ? low[0] : low[1], 1);
  const std::uint32_t high_other = __shfl_xor_sync(~0u, odd ? high[0] : high[1], 1);
  words[0] = odd ? low_other : low[0];
  words[1] = odd ? low[1] : low_other;
  words[2] = odd ? high_other : high[0];
  words[3] = odd ? high[1] : high_other;
}

/// Eight keys of a mask as they lie in memory.
template <typename Element>
struct alignas(sizeof(Element) == 1 ? 8 : 16) EightKeys {
  Element key[8];
};

/// Bits of those of eight bytes that are not 0.
__device__ __forceinline__ std::uint32_t shown_bits(const EightKeys<std::byte>& eight) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(eight.key);
  const std::uint32_t low = __dp4a(__vsetne4(words[0], 0), 0x08040201u, 0u);
  return __dp4a(__vsetne4(words[1], 0), 0x80402010u, low);
}

/// Of one row, eight keys at a time; `first_gmem` is the tile's first, of `keys` that there are from it on.
template <ForwardConfig c, typename Element>
__device__ __forceinline__ void read_mask_row(MaskValues<c>& values, int half, const Element* first_gmem,
                                              int keys, int lane) {
  const int t = lane % 4;
#pragma unroll
  for (int from = 0; from < c.keys; from += 32) {
    EightKeys<Element> eight{};
    const int own = from + 8 * t;
    if (own < std::min(from + 32, c.keys) && own < keys) {
      eight = *reinterpret_cast<const EightKeys<Element>*>(first_gmem + own);
    }
    constexpr int eights = 4;
    if constexpr (sizeof(Element) == 1) {
      std::uint32_t bits = shown_bits(eight) << (8 * t);
      bits |= __shfl_xor_sync(~0u, bits, 1);
      bits |= __shfl_xor_sync(~0u, bits, 2);
      bits >>= 2 * t;
#pragma unroll
      for (int n = 0; n < std::min(eights, (c.keys - from) / 8); ++n) {
        float* const to = &values[(from / 8 + n) * 4 + 2 * half];
        to[0] = (bits & (1u << (8 * n))) != 0 ? 0.0f : minus_infinity;
        to[1] = (bits & (2u << (8 * n))) != 0 ? 0.0f : minus_infinity;
      }
    } else {
      constexpr int words_of_pair = sizeof(Element) / 2;
      std::uint32_t words[words_of_pair][4];
#pragma unroll
      for (int n = 0; n < 4 * words_of_pair; ++n) {
        words[n % words_of_pair][n / words_of_pair] = reinterpret_cast<const std::uint32_t*>(eight.key)[n];
      }
#pragma unroll
      for (auto& four : words) turn_words(four, lane);
#pragma unroll
      for (int n = 0; n < std::min(eights, (c.keys - from) / 8); ++n) {
        float* const to = &values[(from / 8 + n) * 4 + 2 * half];
        if constexpr (words_of_pair == 2) {
          to[0] = __uint_as_float(words[0][n]);
          to[1] = __uint_as_float(words[words_of_pair - 1][n]);
        } else {
          Element pair[2];
          *reinterpret_cast<std::uint32_t*>(pair) = words[0][n];
          to[0] = mask_value(pair[0]);
          to[1] = mask_value(pair[1]);
        }
      }
    }
  }
}

/// The same of keys that lie `stride` apart, or of rows that begin anywhere: one by one.
template <ForwardConfig c, typename Element>
__device__ __forceinline__ void read_mask_row_by_key(MaskValues<c>& values, int half,
                                                     const Element* first_gmem, std::int64_t stride, int keys,
                                                     int lane) {
  const int own = lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < c.keys / 4; ++n) {
    const int key = own + n / 2 * 8 + n % 2;
    values[n / 2 * 4 + 2 * half + n % 2] = key < keys ? mask_value(first_gmem[key * stride]) : 0.0f;
  }
}

/// Of a lane's two rows, of which the second may be past the last. Where all rows have the same values, they
/// are read once.
template <ForwardConfig c, typename Element, bool in_eights>
__device__ __forceinline__ void read_mask_rows(MaskValues<c>& values, const MaskArguments& mask, int b, int h,
                                               int row, int rows, int key, int keys, int lane) {
  const auto* first_gmem = reinterpret_cast<const Element*>(mask.data) + b * mask.stride[0] +
                           h * mask.stride[1] + key * mask.stride[3];
  const auto read = [&](int half) {
    const Element* row_gmem = first_gmem + min(row + 8 * half, rows - 1) * mask.stride[2];
    if constexpr (in_eights) {
      read_mask_row<c>(values, half, row_gmem, keys - key, lane);
    } else {
      read_mask_row_by_key<c>(values, half, row_gmem, mask.stride[3], keys - key, lane);
    }
  };
  read(0);
  if (mask.stride[2] != 0) return read(1);
#pragma unroll
  for (int n = 0; n < c.keys / 2; n += 4) {
    values[n + 2] = values[n];
    values[n + 3] = values[n + 1];
  }
}

/// `row` is the lane's row g, `key` the tile's first key; of `rows` and `keys` that there are.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void read_mask(MaskValues<c>& values, const MaskArguments& mask, int b, int h,
                                          int row, int rows, int key, int keys, int lane) {
  const auto read = [&]<typename Element>(Element) {
    mask.in_eights ? read_mask_rows<c, Element, true>(values, mask, b, h, row, rows, key, keys, lane)
                   : read_mask_rows<c, Element, false>(values, mask, b, h, row, rows, key, keys, lane);
  };
  if (mask.element == MaskArguments::Element::boolean) {
    read(std::byte{});
  } else if (mask.element == MaskArguments::Element::half) {
    read(T{});
  } else if (mask.element == MaskArguments::Element::single) {
    read(float{});
  } else {
#pragma unroll
    for (int n = 0; n < c.keys / 2; ++n) values[n] = 0;
  }
}

/// Scores from products, or from what ALiBi made of them with a scale of 1.
template <ForwardConfig c>
__device__ __forceinline__ void add_mask(Scores<c>& s, const MaskValues<c>& values, float scale) {
#pragma unroll
  for (int n = 0; n < c.keys / 2; ++n) s[n] = fmaf(s[n], scale, values[n]);
}

}  // namespace tilewise::cuda::wgmma
